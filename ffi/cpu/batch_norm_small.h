// Batch norm on the CPU of groups of few elements, as vmap makes them: groups side by side
// (cpu/side_by_side.h). A group is a row then, and each of its elements a column.
#pragma once

#include "ops/batch_norm.h"

namespace gradops {

// Groups of up to so many elements. How many there are does not matter, so that a group's result
// does not depend on it.
inline constexpr int kSmallGroup = 256;
inline bool IsSmall(const ChannelShape& shape) {
  return shape.elements() > 0 && shape.channels() * shape.terms() <= kSmallGroup;
}

// Of groups that IsSmall says so of. No scratch but the stack, and a copy of what has another dtype
// than sums have.
ffi::Error SmallBatchNormFwd(const CpuContext& pool, const BatchNormFwdArgs& args);
ffi::Error SmallBatchNormBwd(const CpuContext& pool, const BatchNormBwdArgs& args);

}  // namespace gradops
