// Execution contexts, and the adapter from a typed C++ function to the symbol that XLA calls.
#pragma once

#include <type_traits>
#include <utility>

#include "xla/ffi/api/ffi.h"

struct CUstream_st;  // so that this header needs no CUDA installation

namespace gradops {

namespace ffi = ::xla::ffi;

using CpuContext = ffi::ThreadPool;
using CudaContext = CUstream_st*;  // cudaStream_t

using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;

template <class Context>
auto Bind() {
  if constexpr (std::is_same_v<Context, CudaContext>) {
    return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<CudaContext>>();
  } else {
    return ffi::Ffi::Bind().Ctx<Context>();
  }
}

// Adds operands and results, of which there is at least one, after contexts and attributes.
template <int kOperands, int kResults, class Binding>
auto Buffers(Binding binding) {
  if constexpr (kOperands > 0) {
    return Buffers<kOperands - 1, kResults>(std::move(binding).template Arg<ffi::AnyBuffer>());
  } else if constexpr (kResults > 1) {
    return Buffers<0, kResults - 1>(std::move(binding).template Ret<ffi::AnyBuffer>());
  } else {
    return std::move(binding).template Ret<ffi::AnyBuffer>();
  }
}

// CUDA handlers only put work on the given stream: no allocation, no synchronisation, no branch on
// device data. So XLA may record them into a CUDA graph, which the trait says; the CPU ignores it.
template <auto MakeBinding, auto Impl>
XLA_FFI_Error* Handler(XLA_FFI_CallFrame* frame) {
  static auto* handler = MakeBinding().To(Impl, {ffi::Traits::kCmdBufferCompatible}).release();
  return handler->Call(frame);
}

}  // namespace gradops
