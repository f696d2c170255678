// A plain copy. `python -m jax_gradops bench` compares the ops that it times with this copy.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/signature.h"

namespace gradops {

struct DeviceCopyArgs {
  const void* x;
  void* y;
  std::int64_t bytes;
};

ffi::Error CopyOnDevice(CpuContext, const DeviceCopyArgs&);   // testing/device_copy.cc
ffi::Error CopyOnDevice(CudaContext, const DeviceCopyArgs&);  // testing/device_copy.cu

struct DeviceCopy {
  static constexpr char kName[] = "device_copy";
  static Signature Declare() {
    return {.name = kName,
            .operands = {{"x", "n", DtypeRule::kX, Presence::kRequired}},
            .results = {{"y", "n", DtypeRule::kX, Presence::kRequired}}};
  }
  template <class Context>
  static ffi::Error Run(Context ctx, In x, Out y) {
    if (!IsFloat(x.element_type()) && x.element_type() != ffi::U8) {
      return ffi::Error::InvalidArgument(
          "device_copy: x must be float16, bfloat16, float32, float64 or uint8; got " +
          Describe(x));
    }
    const auto dims = x.dimensions(), result_dims = y->dimensions();
    if (x.element_type() != y->element_type() || dims.size() != result_dims.size() ||
        !std::equal(dims.begin(), dims.end(), result_dims.begin())) {
      return ffi::Error::InvalidArgument("device_copy: y must have x's shape and dtype; got " +
                                         Describe(*y) + " for x " + Describe(x));
    }
    const auto bytes = static_cast<std::int64_t>(x.size_bytes());
    return CopyOnDevice(ctx, {.x = x.untyped_data(), .y = y->untyped_data(), .bytes = bytes});
  }

  template <class Context>
  static auto Bind() {
    return gradops::Bind<Context>()
        .template Arg<In>()               // x
        .template Ret<ffi::AnyBuffer>();  // y
  }
};

}  // namespace gradops
