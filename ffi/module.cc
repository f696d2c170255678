// The list of handlers, compiled once per backend with GRADOPS_CONTEXT and GRADOPS_MODULE defined.
#include <nanobind/nanobind.h>

#include "common/build_info.h"
#include "ops/bias_gelu.h"
#include "ops/device_copy.h"
#include "ops/global_norm.h"
#include "ops/layer_norm.h"

namespace nb = nanobind;

namespace gradops {
namespace {

template <auto MakeBinding, auto Impl>
nb::capsule Capsule() {
  return nb::capsule(reinterpret_cast<void*>(&Handler<MakeBinding, Impl>));
}

template <class Context>
nb::dict Registrations() {
  using LayerNorm = gradops::LayerNorm<Context>;
  using BiasGelu = gradops::BiasGelu<Context>;
  using GlobalNorm = gradops::GlobalNorm<Context>;
  nb::dict handlers;
  handlers["layer_norm_fwd"] = Capsule<&LayerNorm::BindFwd, &LayerNorm::Fwd>();
  handlers["layer_norm_bwd"] = Capsule<&LayerNorm::BindBwd, &LayerNorm::Bwd>();
  handlers["rms_norm_fwd"] = Capsule<&LayerNorm::BindRmsFwd, &LayerNorm::RmsFwd>();
  handlers["rms_norm_bwd"] = Capsule<&LayerNorm::BindRmsBwd, &LayerNorm::RmsBwd>();
  handlers["layer_norm_bwd_from_output"] =
      Capsule<&LayerNorm::BindBwdFromOutput, &LayerNorm::BwdFromOutput>();
  handlers["rms_norm_bwd_from_output"] =
      Capsule<&LayerNorm::BindRmsBwdFromOutput, &LayerNorm::RmsBwdFromOutput>();
  handlers["bias_gelu_fwd"] = Capsule<&BiasGelu::BindFwd, &BiasGelu::Fwd>();
  handlers["bias_gelu_bwd"] = Capsule<&BiasGelu::BindBwd, &BiasGelu::Bwd>();
  handlers["sum_of_squares"] = Capsule<&GlobalNorm::Bind, &GlobalNorm::Run>();
  handlers["device_copy"] = Capsule<&DeviceCopy<Context>::Bind, &DeviceCopy<Context>::Run>();
  return handlers;
}

}  // namespace
}  // namespace gradops

NB_MODULE(GRADOPS_MODULE, m) {
  m.attr("ffi_api_version") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("build_info") = gradops::kBuildInfo;
  m.attr("cuda_skipped") = gradops::kCudaSkipped;
  m.def("registrations", &gradops::Registrations<gradops::GRADOPS_CONTEXT>);
}
