// A plan in words, for tests and people.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradops {

struct Description {
  struct Number {
    const char* name;
    std::int64_t value;
    const char* meaning;
  };

  std::string kernel;
  std::string file;  // in ffi/cuda
  std::vector<Number> numbers;
};

}  // namespace gradops
