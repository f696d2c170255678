// A line of a GPU's caches: what is read at once, and, if others write or read its rest, more
// often.
#pragma once

namespace gradops {

inline constexpr int kLineBytes = 128;
inline constexpr int kLinePacks = kLineBytes / 16;  // of 16 bytes

}  // namespace gradops
