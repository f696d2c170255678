// A Python module with what the benchmark and the tests need on the CPU beside the ops. No release
// has it.
#include <nanobind/nanobind.h>

#include "common/python.h"
#include "testing/ops.h"

NB_MODULE(_testing_cpu, m) {
  gradops::BindHandlers<gradops::CpuContext>(m, gradops::TestingOps());
}
