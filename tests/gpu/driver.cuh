// What the norms' drivers share: they end where something fails. Both directions' launchers.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <source_location>

#include "cuda/layer_norm_bwd.cu"
#include "cuda/layer_norm_fwd.cu"

namespace gradops {
namespace {

void Check(cudaError_t status, std::source_location at = std::source_location::current()) {
  if (status == cudaSuccess) return;
  std::printf("%s:%u: %s\n", at.file_name(), at.line(), cudaGetErrorString(status));
  std::exit(1);
}

void Check(const ffi::Error& error) {
  if (error.success()) return;
  std::printf("%s\n", error.message().c_str());
  std::exit(1);
}

}  // namespace
}  // namespace gradops
