// Execution contexts, the decoding of buffers, and errors of calls.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>
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

// Adds operands and results after contexts and attributes. There is at least one result.
template <int kOperands, int kResults, class Binding>
auto Buffers(Binding&& binding) {
  if constexpr (kOperands > 0) {
    return Buffers<kOperands - 1, kResults>(std::move(binding).template Arg<ffi::AnyBuffer>());
  } else if constexpr (kResults > 1) {
    return Buffers<0, kResults - 1>(std::move(binding).template Ret<ffi::AnyBuffer>());
  } else {
    return std::move(binding).template Ret<ffi::AnyBuffer>();
  }
}

// The most elements of an array, not counting dimensions of 0. It is far more than any memory
// holds. 64 bits can still count the bytes of several such arrays.
inline constexpr std::int64_t kMaxElements = std::int64_t{1} << 48;

// What is wrong with a buffer of any op, or "". Each op checks shapes and dtypes itself.
inline std::string_view MistakeIn(const XLA_FFI_Buffer* buffer) {
  if (buffer == nullptr || buffer->struct_size < XLA_FFI_Buffer_STRUCT_SIZE) {
    return "is no buffer of this FFI version";
  }
  if (buffer->rank < 0 || (buffer->rank > 0 && buffer->dims == nullptr)) return "has no dimensions";
  std::int64_t elements = 1;
  bool empty = false;
  for (std::int64_t i = 0; i < buffer->rank; ++i) {
    const std::int64_t dim = buffer->dims[i];
    if (dim < 0) return "has a negative dimension";
    if (dim > kMaxElements / elements) return "has more than 2^48 elements";
    elements *= std::max<std::int64_t>(1, dim);
    empty |= dim == 0;
  }
  return empty || buffer->data != nullptr ? "" : "has no data";
}

// The first mistake in the operands and results of a call, or "". All of them have to be buffers.
inline std::string MistakeIn(const XLA_FFI_CallFrame& frame) {
  const auto first_of = [](const char* what, const auto& all, auto buffer, void* const* buffers) {
    for (std::int64_t i = 0; i < all.size; ++i) {
      const auto mistake = all.types[i] != buffer
                               ? std::string_view("is no buffer")
                               : MistakeIn(static_cast<const XLA_FFI_Buffer*>(buffers[i]));
      if (!mistake.empty()) return what + std::to_string(i) + ' ' + std::string(mistake);
    }
    return std::string();
  };
  const std::string mistake =
      first_of("operand ", frame.args, XLA_FFI_ArgType_BUFFER, frame.args.args);
  return mistake.empty() ? first_of("result ", frame.rets, XLA_FFI_RetType_BUFFER, frame.rets.rets)
                         : mistake;
}

inline XLA_FFI_Error* MakeError(const XLA_FFI_Api* api, XLA_FFI_Error_Code code,
                                const std::string& message) {
  XLA_FFI_Error_Create_Args args{.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE,
                                 .extension_start = nullptr,
                                 .message = message.c_str(),
                                 .errc = code};
  return api->XLA_FFI_Error_Create(&args);
}

// Adds the op's name to an error: the errors of XLA's decoder do not name the op.
inline XLA_FFI_Error* NameOp(const XLA_FFI_Api* api, std::string_view op, XLA_FFI_Error* error) {
  const std::string message = ffi::internal::GetErrorMessage(api, error);
  if (message.starts_with(op)) return error;
  ffi::internal::DestroyError(api, error);
  return MakeError(api, XLA_FFI_Error_Code_INVALID_ARGUMENT, std::string(op) + ": " + message);
}

// Calls the handler if all buffers are well-formed. std::bad_alloc becomes an error: XLA would end
// the process if an exception left this function.
inline XLA_FFI_Error* Call(std::string_view op, const ffi::Ffi& handler, XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Api* const api = frame->api;
  try {
    if (frame->struct_size == XLA_FFI_CallFrame_STRUCT_SIZE) {
      const std::string mistake = MistakeIn(*frame);
      if (!mistake.empty()) {
        return MakeError(api, XLA_FFI_Error_Code_INVALID_ARGUMENT,
                         std::string(op) + ": " + mistake);
      }
    }
    XLA_FFI_Error* const error = handler.Call(frame);
    return error == nullptr ? nullptr : NameOp(api, op, error);
  } catch (const std::bad_alloc&) {
    return MakeError(api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED,
                     std::string(op) + ": out of memory");
  }
}

}  // namespace gradops
