// A plan in words, for tests and people.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace gradops {

struct Description {
  std::string kernel;
  std::vector<std::pair<const char*, std::int64_t>> numbers;
};

}  // namespace gradops
