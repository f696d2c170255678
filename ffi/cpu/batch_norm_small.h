// Batch norm on the CPU of small groups, as vmap makes them.
#pragma once

#include "ops/batch_norm.h"

namespace gradops {

// Groups of up to so many elements lie side by side (cpu/side_by_side.h). A group is a row then,
// and each of its elements a column. The number of groups does not matter: a group's result must
// not depend on it.
inline constexpr int kSmallGroup = 256;
inline bool IsSmall(const ChannelShape& shape) {
  return shape.elements() > 0 && shape.channels() * shape.terms() <= kSmallGroup;
}

// Channels last, groups of up to so many are done one by one, by a plain loop.
inline constexpr int kMiddleGroup = 4096, kMiddleChannels = 1024;
inline bool IsMiddle(const ChannelShape& shape) {
  return shape.elements() > 0 && shape.inner == 1 && shape.channels() <= kMiddleChannels &&
         shape.channels() * shape.terms() <= kMiddleGroup;
}

// Of groups that IsSmall or IsMiddle holds for. Scratch is the stack alone, and a copy of each
// parameter of another dtype than sums have.
ffi::Error SmallBatchNormFwd(const CpuContext& pool, const BatchNormFwdArgs& args);
ffi::Error SmallBatchNormBwd(const CpuContext& pool, const BatchNormBwdArgs& args);
ffi::Error MiddleBatchNormFwd(const CpuContext& pool, const BatchNormFwdArgs& args);
ffi::Error MiddleBatchNormBwd(const CpuContext& pool, const BatchNormBwdArgs& args);

}  // namespace gradops
