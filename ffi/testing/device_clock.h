// Reads the time at which the device reaches this operation. `python -m jax_gradops bench` times
// the work that is queued between two such operations. The host's clock would not do: the host
// learns of the end of device work late, and not always equally late.
#pragma once

#include <cstdint>

#include "common/signature.h"

namespace gradops {

// Stores the nanoseconds since an unknown time: first the low half, then the high half.
ffi::Error ReadClock(CpuContext, std::uint32_t* ns);   // testing/device_clock.cc
ffi::Error ReadClock(CudaContext, std::uint32_t* ns);  // testing/device_clock.cu

struct DeviceClock {
  static constexpr char kName[] = "device_clock";
  static Signature Declare() {
    return {.name = kName,
            .operands = {},
            .results = {{"ns", "", DtypeRule::kAccum, Presence::kRequired}}};
  }
  template <class Context>
  static ffi::Error Run(Context ctx, Out ns) {
    const auto dims = ns->dimensions();
    if (ns->element_type() != ffi::U32 || dims.size() != 1 || dims[0] != 2) {
      return ffi::Error::InvalidArgument("device_clock: ns must be uint32[2]; got " +
                                         Describe(*ns));
    }
    return ReadClock(ctx, static_cast<std::uint32_t*>(ns->untyped_data()));
  }

  template <class Context>
  static auto Bind() {
    return gradops::Bind<Context>().template Ret<ffi::AnyBuffer>();  // ns
  }
};

}  // namespace gradops
