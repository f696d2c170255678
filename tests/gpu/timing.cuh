// Time measurement of the drivers that tune kernels.
#pragma once

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "driver.cuh"

namespace gradops {
namespace {

// The number of sets of buffers. Calls use the sets in turn.
constexpr int kSets = 3;

struct Timing {
  float low, median, high;  // microseconds: 20th, 50th, 80th percentile
};

cudaStream_t Stream() {
  static const cudaStream_t stream = [] {
    cudaStream_t created;
    Check(cudaStreamCreate(&created));
    return created;
  }();
  return stream;
}

// The time of one call of fn(0), fn(1), ..., from 9 replays of a CUDA graph. The graph has `calls`
// calls, as XLA's command buffers do. Otherwise small arrays would measure the host's launches.
template <typename Fn>
Timing Time(const Fn& fn, int calls = 6) {
  cudaEvent_t start, stop;
  Check(cudaEventCreate(&start));
  Check(cudaEventCreate(&stop));
  for (int i = 0; i < kSets; ++i) fn(i);
  cudaGraph_t graph;
  cudaGraphExec_t program;
  Check(cudaStreamBeginCapture(Stream(), cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) fn(i % kSets);
  Check(cudaStreamEndCapture(Stream(), &graph));
  Check(cudaGraphInstantiate(&program, graph, 0));
  std::vector<float> samples;
  for (int series = 0; series < 10; ++series) {
    Check(cudaEventRecord(start, Stream()));
    Check(cudaGraphLaunch(program, Stream()));
    Check(cudaEventRecord(stop, Stream()));
    Check(cudaEventSynchronize(stop));
    float ms = 0;
    Check(cudaEventElapsedTime(&ms, start, stop));
    if (series > 0) samples.push_back(ms / static_cast<float>(calls) * 1e3f);
  }
  Check(cudaGetLastError());
  Check(cudaGraphExecDestroy(program));
  Check(cudaGraphDestroy(graph));
  Check(cudaEventDestroy(start));
  Check(cudaEventDestroy(stop));
  std::sort(samples.begin(), samples.end());
  return {samples[1], samples[4], samples[7]};
}

// Calls run.operator()<T>() for the type with this name. Returns the exit status of the process.
template <typename Fn>
int ForType(const std::string& type, const Fn& run) {
  if (type == "bf16") {
    run.template operator()<BFloat16>();
  } else if (type == "f16") {
    run.template operator()<Half>();
  } else if (type == "f32") {
    run.template operator()<float>();
  } else if (type == "f64") {
    run.template operator()<double>();
  } else {
    std::printf("unknown type %s\n", type.c_str());
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace gradops
