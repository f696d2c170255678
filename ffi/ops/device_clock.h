// When the device gets there: with it `python -m jax_gradops bench` times what is queued between
// two calls, where the host would be told of their ends late, and unequally so.
#pragma once

#include <cstdint>

#include "common/handler.h"
#include "common/shape.h"

namespace gradops {

// Nanoseconds since an unknown time: the low and the high half.
ffi::Error ReadClock(CpuContext, std::uint32_t* ns);   // cpu/device_clock.cc
ffi::Error ReadClock(CudaContext, std::uint32_t* ns);  // cuda/device_clock.cu

template <class Context>
struct DeviceClock {
  static ffi::Error Run(Context ctx, Out ns) {
    const auto dims = ns->dimensions();
    if (ns->element_type() != ffi::U32 || dims.size() != 1 || dims[0] != 2) {
      return ffi::Error::InvalidArgument("device_clock: ns must be uint32[2]; got " +
                                         Describe(*ns));
    }
    return ReadClock(ctx, static_cast<std::uint32_t*>(ns->untyped_data()));
  }

  static auto Bind() {
    return gradops::Bind<Context>().template Ret<ffi::AnyBuffer>();  // ns
  }
};

}  // namespace gradops
