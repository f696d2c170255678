// Reads the time at which the device reaches this operation. `python -m jax_gradops bench` times
// the work that is queued between two such operations. The host's clock would not do: the host
// learns of the end of device work late, and not always equally late. The operation may first keep
// the device waiting, so that the host can queue work meanwhile.
#pragma once

#include <cstdint>
#include <string>

#include "common/signature.h"

namespace gradops {

// Waits. Then stores the nanoseconds since an unknown time: first the low half, then the high half.
ffi::Error ReadClock(CpuContext, double wait_ms, std::uint32_t* ns);   // device_clock.cc
ffi::Error ReadClock(CudaContext, double wait_ms, std::uint32_t* ns);  // device_clock.cu

struct DeviceClock {
  static constexpr char kName[] = "device_clock";
  static constexpr double kLongestWait = 1000;  // milliseconds
  static Signature Declare() {
    return {.name = kName,
            .operands = {},
            .results = {{"ns", "", DtypeRule::kAccum, Presence::kRequired}}};
  }
  template <class Context>
  static ffi::Error Run(Context ctx, double wait_ms, Out ns) {
    const auto dims = ns->dimensions();
    if (ns->element_type() != ffi::U32 || dims.size() != 1 || dims[0] != 2) {
      return ffi::Error::InvalidArgument("device_clock: ns must be uint32[2]; got " +
                                         Describe(*ns));
    }
    if (!(wait_ms >= 0 && wait_ms <= kLongestWait)) {
      return ffi::Error::InvalidArgument("device_clock: wait_ms must be 0 to 1000 ms; got " +
                                         std::to_string(wait_ms));
    }
    return ReadClock(ctx, wait_ms, static_cast<std::uint32_t*>(ns->untyped_data()));
  }

  template <class Context>
  static auto Bind() {
    return gradops::Bind<Context>()
        .template Attr<double>("wait_ms")
        .template Ret<ffi::AnyBuffer>();  // ns
  }
};

}  // namespace gradops
