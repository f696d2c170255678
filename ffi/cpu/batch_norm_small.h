// Batch norm and group norm on the CPU for small groups, such as vmap makes.
#pragma once

#include "ops/batch_norm.h"

namespace gradops {

// Groups of up to this many elements lie side by side (cpu/side_by_side.h). There, a group is a
// row, and each of its elements is a column. A group's result must not depend on the number of
// groups.
inline constexpr int kSmallGroup = 256;
inline bool IsSmall(const ChannelShape& shape) {
  return shape.elements() > 0 && shape.channels() * shape.terms() <= kSmallGroup;
}

// With channels last, a plain loop does groups of up to this size one by one.
inline constexpr int kMiddleGroup = 4096, kMiddleChannels = 1024;
inline bool IsMiddle(const ChannelShape& shape) {
  return shape.elements() > 0 && shape.inner == 1 && shape.channels() <= kMiddleChannels &&
         shape.channels() * shape.terms() <= kMiddleGroup;
}

// Group norm of bundles whose elements lie together, in short channels of up to kJoinedInner
// elements (batch_norm_joined.cc). A bundle has up to kJoinedBundle elements.
inline constexpr int kJoinedInner = 128, kJoinedBundle = 8192;
template <class Args>
bool IsJoined(const Args& args) {
  return args.shape.elements() > 0 && args.shape.outer.rows == 1 &&
         args.shape.inner <= kJoinedInner && args.bundle * args.shape.inner <= kJoinedBundle;
}
ffi::Error JoinedGroupNormFwd(const CpuContext& pool, const BatchNormFwdArgs& args);
ffi::Error JoinedGroupNormBwd(const CpuContext& pool, const BatchNormBwdArgs& args);

// For groups that pass IsSmall or IsMiddle. Scratch is on the stack, except for copies of
// parameters whose dtype is not the accumulation dtype.
ffi::Error SmallBatchNormFwd(const CpuContext& pool, const BatchNormFwdArgs& args);
ffi::Error SmallBatchNormBwd(const CpuContext& pool, const BatchNormBwdArgs& args);
ffi::Error MiddleBatchNormFwd(const CpuContext& pool, const BatchNormFwdArgs& args);
ffi::Error MiddleBatchNormBwd(const CpuContext& pool, const BatchNormBwdArgs& args);

}  // namespace gradops
