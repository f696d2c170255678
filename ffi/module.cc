// A Python module, compiled once per backend with GRADOPS_CONTEXT and GRADOPS_MODULE defined.
#include <nanobind/nanobind.h>

#include <string_view>
#include <type_traits>

#include "common/build_info.h"
#include "common/devices.h"
#include "common/python.h"
#include "ops/handlers.h"

namespace nb = nanobind;

namespace gradops {
namespace {

// The GPUs of this machine. jax_gradops/_registry.py decides whether the kernels can run on them.
template <class Context>
void BindDevices(nb::module_& m) {
  if constexpr (std::is_same_v<Context, CudaContext>) {
    m.def("devices", [] {
      const FoundDevices found = FindDevices();
      nb::list architectures;
      for (const int architecture : found.architectures) architectures.append(architecture);
      return nb::make_tuple(architectures, found.driver, found.runtime);
    });
  }
}

}  // namespace
}  // namespace gradops

NB_MODULE(GRADOPS_MODULE, m) {
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("build_info") = gradops::kBuildInfo;
  nb::dict levels;
  for (const auto& [level, supported] : gradops::CpuLevels()) {
    if (gradops::kCpuLevels.find(level) != std::string_view::npos) levels[level] = supported;
  }
  m.attr("cpu_levels") = levels;
  m.attr("cuda_skipped") = gradops::kCudaSkipped;
  gradops::BindHandlers<gradops::GRADOPS_CONTEXT>(m, gradops::AllOps());
  gradops::BindDevices<gradops::GRADOPS_CONTEXT>(m);
}
