// A line of a GPU's caches: the unit in which memory is read. A line is read more than once if its
// parts are used at different times, or if other threads write to it.
#pragma once

namespace gradops {

inline constexpr int kLineBytes = 128;
inline constexpr int kLineVectors = kLineBytes / 16;  // vectors of 16 bytes

inline constexpr int kWarpThreads = 32;

}  // namespace gradops
