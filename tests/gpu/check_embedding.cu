#include "cuda/embedding/embedding.cu"
#include <vector>
#include <random>
#include <cstdio>
#include <cmath>
#include <string>
using namespace gradops;
template <class T, class O> bool Case(std::int64_t n, std::int64_t v, std::int64_t d, int kind, int seed) {
  std::mt19937 rng(seed);
  std::vector<std::int32_t> idx(n), numbers(v);
  for (std::int64_t i = 0; i < v; ++i) numbers[i] = i;
  for (auto& i : idx) { int r = rng() % 8; i = kind == 0 ? rng() % v : kind == 1 ? (r < 6 ? 0 : rng() % v) : kind == 2 ? v / 2 : kind == 3 ? (r < 3 ? v - 1 : (r < 5 ? v : rng() % v)) : (r < 4 ? -1 : (int)(rng() % (v + 3))); }
  std::vector<T> x(n * d); for (auto& a : x) a = static_cast<T>((float)((int)(rng() % 17) - 8));
  std::vector<double> want(v * d, 0.0);
  for (std::int64_t i = 0; i < n; ++i) if (idx[i] >= 0 && idx[i] < v) for (std::int64_t f = 0; f < d; ++f) want[idx[i] * d + f] += static_cast<double>(static_cast<float>(x[i * d + f]));
  std::int64_t blocks = (n + v + 1 + 127) / 128, bytes = 17 * n + blocks * (16 * d + 4) + (1 << 17), p = (bytes + 4 * d - 1) / (4 * d);
  EmbeddingBwdArgs a{}; a.shape = {1, n, d}; a.dtype = kDtype<T>; a.table_rows = v;
  void *dx, *di, *dn, *dt, *dw;
  cudaMalloc(&dx, x.size() * sizeof(T)); cudaMalloc(&di, n * 4); cudaMalloc(&dn, v * 4); cudaMalloc(&dt, v * d * sizeof(O)); cudaMalloc(&dw, p * d * sizeof(Accum<T>));
  cudaMemcpy(dx, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice); cudaMemcpy(di, idx.data(), n * 4, cudaMemcpyHostToDevice); cudaMemcpy(dn, numbers.data(), v * 4, cudaMemcpyHostToDevice);
  cudaMemset(dt, 0x7f, v * d * sizeof(O)); cudaMemset(dw, 0x7f, p * d * sizeof(Accum<T>));
  a.x = dx; a.indices = di; a.numbers = {dn, 0, ffi::S32}; a.dtable = {dt, kDtype<O>}; a.workspace = dw; a.partial_rows = p;
  auto e = EmbeddingBwd(static_cast<cudaStream_t>(nullptr), a);
  cudaError_t s = cudaDeviceSynchronize();
  if (!e.success() || s != cudaSuccess) { printf("n %ld v %ld d %ld kind %d: %s %s\n", n, v, d, kind, e.success() ? "" : e.message().c_str(), cudaGetErrorString(s)); return false; }
  std::vector<O> got(v * d); cudaMemcpy(got.data(), dt, v * d * sizeof(O), cudaMemcpyDeviceToHost);
  std::int64_t wrong = 0, first = -1;
  for (std::int64_t i = 0; i < v * d; ++i) { double g = static_cast<double>(static_cast<float>(got[i])); if (!(std::fabs(g - want[i]) <= 1e-2 * std::fabs(want[i]))) { if (first < 0) first = i; ++wrong; } }
  if (wrong) { printf("n %ld v %ld d %ld kind %d size %zu: %ld wrong, first row %ld feature %ld: %g not %g\n", n, v, d, kind, sizeof(T), wrong, first / d, first % d, (double)(float)got[first], want[first]); }
  for (void* q : {dx, di, dn, dt, dw}) cudaFree(q);
  return wrong == 0;
}
template <class T, class O> void Time(std::int64_t n, std::int64_t v, std::int64_t d, const std::string& kind) {
  std::mt19937_64 rng(1);
  std::vector<double> w(v); for (std::int64_t r = 0; r < v; ++r) w[r] = kind == "text" ? 1 / (r + 2.7) : 1;
  std::discrete_distribution<int> dist(w.begin(), w.end());
  std::vector<std::int32_t> idx(n), numbers(v), perm(v);
  for (std::int64_t i = 0; i < v; ++i) numbers[i] = perm[i] = i;
  std::shuffle(perm.begin(), perm.end(), rng);
  for (auto& i : idx) i = kind == "one" ? 17 : kind == "padding" && rng() % 2 ? 0 : perm[dist(rng)];
  std::int64_t blocks = (n + v + 1 + 127) / 128, bytes = 17 * n + blocks * (16 * d + 4) + (1 << 17), p = (bytes + 4 * d - 1) / (4 * d);
  EmbeddingBwdArgs a{}; a.shape = {1, n, d}; a.dtype = kDtype<T>; a.table_rows = v;
  void *dx, *di, *dn, *dt, *dw;
  cudaMalloc(&dx, n * d * sizeof(T)); cudaMalloc(&di, n * 4); cudaMalloc(&dn, v * 4); cudaMalloc(&dt, v * d * sizeof(O)); cudaMalloc(&dw, p * d * sizeof(Accum<T>));
  cudaMemset(dx, 0x3c, n * d * sizeof(T)); cudaMemcpy(di, idx.data(), n * 4, cudaMemcpyHostToDevice); cudaMemcpy(dn, numbers.data(), v * 4, cudaMemcpyHostToDevice);
  a.x = dx; a.indices = di; a.numbers = {dn, 0, ffi::S32}; a.dtable = {dt, kDtype<O>}; a.workspace = dw; a.partial_rows = p;
  cudaStream_t st; cudaStreamCreate(&st);
  auto e = EmbeddingBwd(st, a); if (!e.success()) { printf("%s\n", e.message().c_str()); return; }
  cudaGraph_t g; cudaGraphExec_t ge; cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal); EmbeddingBwd(st, a); cudaStreamEndCapture(st, &g); cudaGraphInstantiate(&ge, g, 0);
  std::vector<float> ts; cudaEvent_t e0, e1; cudaEventCreate(&e0); cudaEventCreate(&e1);
  for (int r = 0; r < 21; ++r) { cudaEventRecord(e0, st); cudaGraphLaunch(ge, st); cudaEventRecord(e1, st); cudaStreamSynchronize(st); float ms; cudaEventElapsedTime(&ms, e0, e1); ts.push_back(ms * 1e3f); }
  std::sort(ts.begin(), ts.end());
  printf("[%ld, %ld] into %ld, %zu to %zu bytes, %s: %.1f us\n", n, d, v, sizeof(T), sizeof(O), kind.c_str(), ts[10]);
  for (void* q : {dx, di, dn, dt, dw}) cudaFree(q);
}
int main() {
  int bad = 0, all = 0;
  for (int seed = 0; seed < 3; ++seed)
  for (std::int64_t d : {1, 7, 24, 260, 768}) for (std::int64_t v : {1, 5, 50, 1000, 3000}) for (std::int64_t n : {1, 9, 33, 200, 1000, 5000}) for (int kind = 0; kind < 5; ++kind) {
    all += 3;
    bad += !Case<float, float>(n, v, d, kind, seed) + !Case<BFloat16, float>(n, v, d, kind, seed) + !Case<double, double>(n, v, d, kind, seed);
    if (bad > 60) { printf("many\n"); return 1; }
  }
  for (const char* k : {"uniform", "text", "padding", "one"}) { Time<BFloat16, float>(32768, 50304, 768, k); Time<BFloat16, BFloat16>(32768, 50304, 768, k); Time<BFloat16, float>(8192, 128256, 2048, k); Time<BFloat16, float>(131072, 32000, 1024, k); }
  Time<float, float>(32768, 50304, 768, "text");
  printf("%d of %d cases wrong\n", bad, all);
}
