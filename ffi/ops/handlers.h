// The list of ops with handlers.
#pragma once

#include "common/signature.h"
#include "ops/batch_norm.h"
#include "ops/bias_gelu.h"
#include "ops/cross_entropy.h"
#include "ops/embedding.h"
#include "ops/global_norm.h"
#include "ops/group_norm.h"
#include "ops/row_norm.h"

namespace gradops {

// clang-format off: one family a line
using AllOps = TypeList<
    RowNormForward, RowNormBackward,
    BiasGeluForward, BiasGeluBackward,
    BatchNormForward, BatchNormBackward,
    GroupNormForward, GroupNormBackward,
    CrossEntropyForward, CrossEntropyBackward,
    EmbeddingBackward,
    SumOfSquaresOfTree, ScaleTree>;
// clang-format on

}  // namespace gradops
