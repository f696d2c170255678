// A Python module with what the benchmark and the tests need beside the ops. No release has it. It
// is compiled once per backend with GRADOPS_CONTEXT and GRADOPS_MODULE defined.
#include <nanobind/nanobind.h>

#include "common/python.h"
#include "testing/ops.h"

NB_MODULE(GRADOPS_MODULE, m) {
  gradops::BindHandlers<gradops::GRADOPS_CONTEXT>(m, gradops::TestingOps());
}
