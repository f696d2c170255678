// Batch norm on the CPU of small groups, as vmap makes them.
#pragma once

#include "ops/batch_norm.h"

namespace gradops {

// Groups of up to so many elements lie side by side (cpu/side_by_side.h): a group is a row then, and
// each of its elements a column. How many groups there are does not matter, so that a group's result
// does not depend on it.
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

// Of groups that IsSmall or IsMiddle holds for. No scratch but the stack, and a copy of what has another dtype
// than sums have.
ffi::Error SmallBatchNormFwd(const CpuContext& pool, const BatchNormFwdArgs& args);
ffi::Error SmallBatchNormBwd(const CpuContext& pool, const BatchNormBwdArgs& args);
ffi::Error MiddleBatchNormFwd(const CpuContext& pool, const BatchNormFwdArgs& args);
ffi::Error MiddleBatchNormBwd(const CpuContext& pool, const BatchNormBwdArgs& args);

}  // namespace gradops
