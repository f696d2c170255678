// A Python module with what the benchmark and the tests need on GPUs beside the ops. No release has
// it.
#include <nanobind/nanobind.h>

#include "common/python.h"
#include "testing/limited_norms.h"
#include "testing/ops.h"

NB_MODULE(_testing_cuda, m) {
  using Ops = decltype(gradops::Joined(
      gradops::TestingOps(),
      gradops::TypeList<gradops::LimitedNormForward, gradops::LimitedNormBackward>()));
  gradops::BindHandlers<gradops::CudaContext>(m, Ops());
}
