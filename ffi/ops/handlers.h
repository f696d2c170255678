// The list of handlers.
#pragma once

#include <array>

#include "common/handler.h"
#include "ops/batch_norm.h"
#include "ops/bias_gelu.h"
#include "ops/global_norm.h"
#include "ops/row_norm.h"
#include "testing/device_clock.h"
#include "testing/device_copy.h"

namespace gradops {

struct NamedHandler {
  const char* name;
  XLA_FFI_Handler* call;
};

template <OpName kOp, auto MakeBinding, auto Impl>
constexpr NamedHandler Named() {
  return {kOp.text, &Handler<kOp, MakeBinding, Impl>};
}

template <class Context>
constexpr auto Handlers() {
  using LayerNorm = gradops::LayerNorm<Context>;
  using BiasGelu = gradops::BiasGelu<Context>;
  using GlobalNorm = gradops::GlobalNorm<Context>;
  using BatchNorm = gradops::BatchNorm<Context>;
  using DeviceClock = gradops::DeviceClock<Context>;
  using DeviceCopy = gradops::DeviceCopy<Context>;
  return std::array{
      Named<"layer_norm_fwd", &LayerNorm::BindFwd, &LayerNorm::Fwd>(),
      Named<"layer_norm_bwd", &LayerNorm::BindBwd, &LayerNorm::Bwd>(),
      Named<"rms_norm_fwd", &LayerNorm::BindRmsFwd, &LayerNorm::RmsFwd>(),
      Named<"rms_norm_bwd", &LayerNorm::BindRmsBwd, &LayerNorm::RmsBwd>(),
      Named<"layer_norm_bwd_from_output", &LayerNorm::BindBwdFromOutput,
            &LayerNorm::BwdFromOutput>(),
      Named<"rms_norm_bwd_from_output", &LayerNorm::BindRmsBwdFromOutput,
            &LayerNorm::RmsBwdFromOutput>(),
      Named<"bias_gelu_fwd", &BiasGelu::BindFwd, &BiasGelu::Fwd>(),
      Named<"bias_gelu_bwd", &BiasGelu::BindBwd, &BiasGelu::Bwd>(),
      Named<"batch_norm_fwd", &BatchNorm::BindFwd, &BatchNorm::Fwd>(),
      Named<"batch_norm_bwd", &BatchNorm::BindBwd, &BatchNorm::Bwd>(),
      Named<"sum_of_squares", &GlobalNorm::BindSumOfSquares, &GlobalNorm::SumOfSquares>(),
      Named<"scale", &GlobalNorm::BindScale, &GlobalNorm::Scale>(),
      Named<"device_clock", &DeviceClock::Bind, &DeviceClock::Run>(),
      Named<"device_copy", &DeviceCopy::Bind, &DeviceCopy::Run>(),
  };
}

}  // namespace gradops
