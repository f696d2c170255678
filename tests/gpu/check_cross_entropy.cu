// Runs the kernels of softmax cross-entropy without JAX, also with plans that this GPU does not
// choose. Shapes are small and awkward. The expected results are long expressions in double on the
// host. compute-sanitizer's four tools run the program too.
//
// Operands are cudaMalloc buffers of exact size: memcheck finds reads outside them. Results, and
// operands that become results, lie between canaries: the program finds writes outside them.
//
// tests/gpu/run.sh check builds and runs it.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cross_entropy_reference.h"
#include "cuda/cross_entropy/cross_entropy.cu"
#include "driver.cuh"

namespace gradops {
namespace {

// --- Comparisons ---------------------------------------------------------------------------------

// NaN equals NaN. If the expected number is not finite, only this number is right.
void Near(const char* name, std::int64_t i, double got, double want, double error) {
  if (got == want || (std::isnan(got) && std::isnan(want))) return;
  if (std::isfinite(want) && std::fabs(got - want) <= error) return;
  std::printf("%s: %s[%lld] is %.9g, not %.9g (%g)\n", Doing().c_str(), name,
              static_cast<long long>(i), got, want, error);
  std::exit(1);
}

// An array between canaries. Its elements are NaN at first.
template <typename T>
class Guarded {
 public:
  Guarded(std::int64_t n, std::int64_t shift, Arrays& arrays)
      : front_(static_cast<std::size_t>(kCanaries + shift)),
        size_(static_cast<std::size_t>(n)),
        whole_(n + shift + 2 * kCanaries, 0, arrays) {
    Poison();
  }
  // Writes canaries and NaNs, on the device too.
  void Poison() {
    std::memset(static_cast<void*>(whole_.host.data()), kCanary, whole_.bytes());
    std::memset(static_cast<void*>(data()), 0xff, size_ * sizeof(T));
    whole_.Upload();
  }
  void Set(const std::vector<T>& values) {
    std::copy(values.begin(), values.end(), data());
    whole_.Upload();
  }
  void Download(const char* name) {
    whole_.Download();
    const auto* const bytes = reinterpret_cast<const unsigned char*>(whole_.host.data());
    const std::size_t begin = front_ * sizeof(T), end = begin + size_ * sizeof(T);
    for (std::size_t i = 0; i < whole_.bytes(); ++i) {
      if ((i < begin || i >= end) && bytes[i] != kCanary) {
        std::printf("%s: wrote to byte %lld of %s, which has %lld\n", Doing().c_str(),
                    static_cast<long long>(i) - static_cast<long long>(begin), name,
                    static_cast<long long>(end - begin));
        std::exit(1);
      }
    }
  }
  T* device() const { return whole_.device + front_; }
  double operator[](std::int64_t i) const { return whole_[static_cast<std::int64_t>(front_) + i]; }
  // The bits of all elements.
  std::string Bytes() const {
    return {reinterpret_cast<const char*>(whole_.host.data() + front_), size_ * sizeof(T)};
  }

 private:
  static constexpr unsigned char kCanary = 0xa7;
  static constexpr std::int64_t kCanaries = 256 / static_cast<std::int64_t>(sizeof(T));

  T* data() { return whole_.host.data() + front_; }

  std::size_t front_, size_;
  Array<T> whole_;
};

// --- Cases ---------------------------------------------------------------------------------------

struct Options {
  bool differences = false;  // forward: the sum of differences is wanted
  bool uniform = false;      // backward: there is such a number for each row
  bool in_place = false;     // dx is x
  bool shared = true;        // all groups have the same classes
  std::int64_t groups = 1;
  std::int64_t shift = 0;     // elements from a 16-byte boundary to the start of x
  std::int64_t dx_shift = 0;  // the same of dx
};

// Rows of logits.
enum class Logits {
  kSmall,
  kLargeMean,  // small differences
  kWide,       // one logit is far above all others
  kEqual,
  kFewClasses,  // some logits are -inf, the first one too
  kOneClass,    // all logits but one are -inf
  kNoClass,     // all logits are -inf
  kNaN,
  kInfinite,
  kCount,
};

// Where a row's label is. The ignored label is INT32_MIN.
enum class Label { kAny, kFirst, kLast, kBefore, kBehind, kIgnored, kGreatest, kCount };

template <typename Kind>
Kind KindOf(std::int64_t number) {
  return static_cast<Kind>(number % static_cast<std::int64_t>(Kind::kCount));
}

std::int64_t RandomBelow(std::int64_t n) {
  const auto index = static_cast<std::int64_t>((Random() + 1) / 2 * static_cast<double>(n));
  return std::clamp<std::int64_t>(index, 0, n - 1);
}

// An error that is always allowed. Arithmetic may replace numbers below the smallest normal number
// by 0. For float16, it is the spacing of its smallest numbers.
template <typename T>
constexpr double kLeast = sizeof(T) == 8            ? 0x1p-1022
                          : std::is_same_v<T, Half> ? 0x1p-24
                                                    : 0x1p-126;

// Calls forward and backward with each plan. `number` chooses the kinds of logits and labels.
template <typename T>
class CaseRun {
  using A = Accum<T>;

 public:
  CaseRun(std::int64_t rows, std::int64_t features, const Options& options, std::int64_t number)
      : o_(options),
        shape_{options.groups, rows, features},
        x_(shape_.elements(), options.shift, arrays_),
        dx_(shape_.elements(), options.in_place ? options.shift : options.dx_shift, arrays_),
        labels_(shape_.all_rows(), 0, arrays_),
        classes_((options.shared ? 1 : options.groups) * features, 0, arrays_) {
    SetClasses();
    for (std::int64_t row = 0; row < shape_.all_rows(); ++row) {
      SetLogits(row, KindOf<Logits>(number + row));
      SetLabel(row, KindOf<Label>(number + row));
    }
    x_.Upload(), labels_.Upload(), classes_.Upload();
  }

  // Returns the number of calls.
  int Run() {
    const Device device = CurrentDevice();
    int calls = 0;
    for (const CrossEntropyPlan& plan : Plans(device, /*backward=*/false)) {
      Doing() = Text(plan);
      Forward(plan);
      ++calls;
    }
    Doing() = Text({});
    CheckChosenForward();
    for (const CrossEntropyPlan& plan : Plans(device, /*backward=*/true)) {
      Doing() = Text(plan);
      Backward(plan);
      ++calls;
    }
    return calls + 2;
  }

 private:
  std::string Text(const CrossEntropyPlan& plan) const {
    std::string text(Name(kDtype<T>));
    for (const std::int64_t n : {shape_.groups, shape_.rows, shape_.features}) {
      text += " " + std::to_string(n);
    }
    text += ", options ";
    for (const bool b : {o_.differences, o_.uniform, o_.in_place, o_.shared}) text += b ? "1" : "0";
    text += " " + std::to_string(o_.shift) + " " + std::to_string(o_.dx_shift);
    return text + ", " + (plan.backward ? "backward" : "forward") + ", threads " +
           std::to_string(plan.row_threads) + ", cluster " + std::to_string(plan.cluster) +
           ", chunks " + std::to_string(plan.chunks);
  }

  // --- Operands

  // Classes of a shard begin anywhere.
  void SetClasses() {
    for (std::size_t i = 0; i < classes_.host.size(); ++i) {
      const auto features = static_cast<std::size_t>(shape_.features);
      const std::size_t first = o_.shared && o_.groups == 1 ? 0 : 1000 + 7 * (i / features);
      classes_.host[i] = static_cast<std::int32_t>(first + i % features);
    }
  }
  std::int64_t FirstClass(std::int64_t row) const {
    if (shape_.features == 0) return 0;
    const std::int64_t group = o_.shared ? 0 : row / shape_.rows;
    return classes_.host[static_cast<std::size_t>(group * shape_.features)];
  }

  void SetLabel(std::int64_t row, Label kind) {
    const std::int64_t first = FirstClass(row), features = shape_.features;
    labels_.host[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(
        kind == Label::kFirst      ? first
        : kind == Label::kLast     ? first + features - 1
        : kind == Label::kBefore   ? first - 1
        : kind == Label::kBehind   ? first + features
        : kind == Label::kIgnored  ? kIgnoredLabel
        : kind == Label::kGreatest ? std::numeric_limits<std::int32_t>::max()
                                   : first + RandomBelow(std::max<std::int64_t>(1, features)));
  }
  bool IsIgnored(std::int64_t row) const {
    return labels_.host[static_cast<std::size_t>(row)] == kIgnoredLabel;
  }
  std::int64_t ColumnOf(std::int64_t row) const {
    return labels_.host[static_cast<std::size_t>(row)] - FirstClass(row);
  }

  void SetLogits(std::int64_t row, Logits kind) {
    constexpr double kInfinite = std::numeric_limits<double>::infinity();
    constexpr double kLarge = std::is_same_v<T, Half> ? 6e4 : 1e30;
    const std::int64_t features = shape_.features;
    if (features == 0) return;
    const std::int64_t special = RandomBelow(features);
    for (std::int64_t i = 0; i < features; ++i) {
      double logit = 8 * Random();
      if (kind == Logits::kLargeMean) logit += 1000;
      if (kind == Logits::kWide) logit = kLarge * Random();
      if (kind == Logits::kEqual) logit = 3;
      if (kind == Logits::kFewClasses && (i == 0 || Random() > 0.5)) logit = -kInfinite;
      if (kind == Logits::kOneClass && i != special) logit = -kInfinite;
      if (kind == Logits::kNoClass) logit = -kInfinite;
      if (kind == Logits::kInfinite && i == special) logit = kInfinite;
      T& stored = x_.host[static_cast<std::size_t>(row * features + i)];
      stored = static_cast<T>(static_cast<A>(logit));
      // A NaN with all bits set: sums of its bits and others may be the bits of a number.
      if (kind == Logits::kNaN && i == special)
        std::memset(static_cast<void*>(&stored), 0xff, sizeof(T));
    }
  }
  std::vector<double> Row(std::int64_t row) const {
    std::vector<double> logits(static_cast<std::size_t>(shape_.features));
    for (std::int64_t i = 0; i < shape_.features; ++i) {
      logits[static_cast<std::size_t>(i)] = x_[row * shape_.features + i];
    }
    return logits;
  }
  Param Classes() const { return {classes_.device, o_.shared ? 0 : shape_.features, ffi::S32}; }

  // --- Plans

  CrossEntropyTask TaskOf(const Device& device, bool backward) const {
    return {.shape = shape_,
            .element_bytes = static_cast<int>(sizeof(T)),
            .backward = backward,
            .multiprocessors = device.multiprocessors,
            .has_clusters = device.architecture >= 90};
  }
  // The plan that is chosen, and others for rows of this length.
  std::vector<CrossEntropyPlan> Plans(const Device& device, bool backward) const {
    const CrossEntropyPlan chosen = ChooseCrossEntropyPlan(TaskOf(device, backward));
    std::vector<CrossEntropyPlan> plans{chosen};
    const auto add = [&](int row_threads, int cluster, std::int64_t chunks) {
      plans.push_back({row_threads, cluster, chunks, backward});
    };
    if (shape_.features <= 4097) add(kWarp, 1, 1);
    if (!backward) {
      for (const int cluster : {1, 2, 4, 8}) {
        if (cluster == 1 || device.architecture >= 90) add(kThreads, cluster, 1);
      }
      return plans;
    }
    const std::int64_t chunks =
        CeilDiv(shape_.features * std::int64_t{sizeof(T)}, std::int64_t{16} * kLoads * kThreads);
    add(kThreads, 1, std::max<std::int64_t>(1, chunks));
    return plans;
  }

  // --- Forward

  CrossEntropyFwdArgs ForwardArgs() const {
    CrossEntropyFwdArgs args{};
    args.shape = shape_, args.dtype = kDtype<T>, args.x = x_.device;
    args.labels = labels_.device, args.classes = Classes();
    args.largest = largest_.device(), args.total = total_.device();
    args.logit_of_label = logit_.device();
    args.sum_of_differences = o_.differences ? differences_.device() : nullptr;
    return args;
  }
  void PoisonNumbers() {
    for (auto* numbers : {&largest_, &total_, &logit_, &differences_}) numbers->Poison();
  }
  void DownloadNumbers() {
    Check(cudaDeviceSynchronize());
    largest_.Download("largest"), total_.Download("total");
    logit_.Download("logit_of_label"), differences_.Download("sum_of_differences");
  }

  void Forward(const CrossEntropyPlan& plan) {
    PoisonNumbers();
    Check(ForwardWith(plan, nullptr, ForwardArgs()));
    DownloadNumbers();
    if (expected_.empty()) {
      for (std::int64_t row = 0; row < shape_.all_rows(); ++row) {
        expected_.push_back(IsIgnored(row) ? IgnoredRow() : ExpectRow(Row(row), ColumnOf(row)));
      }
    }
    constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
    for (std::int64_t row = 0; row < shape_.all_rows(); ++row) {
      const ExpectedRow& want = expected_[static_cast<std::size_t>(row)];
      Near("largest", row, largest_[row], want.largest, 0);
      Near("total", row, total_[row], want.total, 64 * kUnit<A> * want.total);
      Near("logit_of_label", row, logit_[row], want.logit_of_label, 0);
      Near("sum_of_differences", row, differences_[row], o_.differences ? want.differences : kNaN,
           32 * kUnit<A> * want.size_of_differences);
    }
  }

  // The handler's launcher chooses the plan. Two equal calls must give equal bits.
  void CheckChosenForward() {
    std::array<std::string, 2> bits;
    for (std::string& all : bits) {
      PoisonNumbers();
      Check(CrossEntropyFwd(CudaContext{nullptr}, ForwardArgs()));
      DownloadNumbers();
      all = largest_.Bytes() + total_.Bytes() + logit_.Bytes() + differences_.Bytes();
    }
    if (bits[0] == bits[1]) return;
    std::printf("%s: two equal calls give other bits\n", Doing().c_str());
    std::exit(1);
  }

  // --- Backward

  // The numbers of a row are arbitrary, but the exponential must not overflow. The numbers of an
  // ignored row are NaN.
  DerivativeOfRow NumbersOf(std::int64_t row) const {
    if (IsIgnored(row)) {
      constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
      return {kNaN, kNaN, kNaN, kNaN};
    }
    const double base = expected_[static_cast<std::size_t>(row)].base();
    const auto round = [](double value) { return static_cast<double>(static_cast<A>(value)); };
    return {round(row % 2 == 0 ? base : base + std::log(static_cast<double>(shape_.features))),
            round(Random()), round(Random()), o_.uniform ? round(Random()) : 0.0};
  }

  void Backward(const CrossEntropyPlan& plan) {
    const std::int64_t rows = shape_.all_rows();
    Arrays arrays;
    std::vector<DerivativeOfRow> numbers;
    for (std::int64_t row = 0; row < rows; ++row) numbers.push_back(NumbersOf(row));
    const auto column = [&](double DerivativeOfRow::* member) {
      return Array<A>(rows, 0, arrays, [&](std::int64_t row) {
        return numbers[static_cast<std::size_t>(row)].*member;
      });
    };
    const Array<A> largest = column(&DerivativeOfRow::largest),
                   factor = column(&DerivativeOfRow::factor),
                   target = column(&DerivativeOfRow::target),
                   uniform = column(&DerivativeOfRow::uniform);
    dx_.Poison();
    if (o_.in_place) dx_.Set(x_.host);
    CrossEntropyBwdArgs args{};
    args.shape = shape_, args.dtype = kDtype<T>;
    args.x = o_.in_place ? dx_.device() : x_.device, args.dx = dx_.device();
    args.labels = labels_.device, args.classes = Classes();
    args.largest = largest.device, args.factor = factor.device, args.target = target.device;
    args.uniform = o_.uniform ? uniform.device : nullptr;
    Check(BackwardWith(plan, nullptr, args));
    Check(cudaDeviceSynchronize());
    dx_.Download("dx");
    for (std::int64_t row = 0; row < rows; ++row) {
      CheckRow(row, numbers[static_cast<std::size_t>(row)]);
    }
  }
  void CheckRow(std::int64_t row, const DerivativeOfRow& derivative) const {
    const std::int64_t label = ColumnOf(row);
    for (std::int64_t i = 0; i < shape_.features; ++i) {
      const std::int64_t at = row * shape_.features + i;
      const double logit = x_[at];
      const double want = IsIgnored(row) ? 0 : derivative.Of(logit, i == label);
      Near("dx", at, dx_[at], want,
           kUnit<T> * std::fabs(want) + 8 * kUnit<A> * derivative.Size(logit) + kLeast<T>);
    }
  }

  const Options o_;
  const RowShape shape_;
  Arrays arrays_;
  Array<T> x_;
  Guarded<T> dx_;
  Array<std::int32_t> labels_, classes_;
  Guarded<A> largest_{shape_.all_rows(), 0, arrays_}, total_{shape_.all_rows(), 0, arrays_},
      logit_{shape_.all_rows(), 0, arrays_}, differences_{shape_.all_rows(), 0, arrays_};
  std::vector<ExpectedRow> expected_;
};

template <typename T>
int RunAll() {
  const Options options[] = {{},
                             {.differences = true, .uniform = true, .in_place = true},
                             {.differences = true, .shared = false, .groups = 3, .shift = 1},
                             {.uniform = true, .in_place = true, .groups = 2, .shift = 1},
                             // x starts at a 16-byte boundary, and dx does not.
                             {.differences = true, .uniform = true, .dx_shift = 1}};
  std::int64_t number = 0;
  int calls = 0;
  const auto run = [&](std::int64_t rows, std::int64_t features, const Options& o) {
    calls += CaseRun<T>(rows, features, o, number++).Run();
  };
  for (const std::int64_t features : {1, 2, 7, 31, 32, 33, 127, 128, 129, 1000, 1024, 2048, 2049,
                                      4096, 4097, 32000, 50257, 128256}) {
    for (const std::int64_t rows : {1, 5, 67, 1061}) {
      if ((rows == 67 && features > 5000) || (rows == 1061 && features > 129)) continue;
      for (const Options& o : options) run(rows, features, o);
    }
  }
  // Without classes, or without rows.
  run(3, 0, {.differences = true});
  run(0, 5, {.differences = true});
  std::printf("%s: %d calls\n", Name(kDtype<T>).c_str(), calls);
  std::fflush(stdout);
  return calls;
}

}  // namespace
}  // namespace gradops

// check_cross_entropy [f32|bf16|f16|f64|reference ...]. Without arguments, all dtypes run.
// `reference` tests the expected results, and needs no GPU.
int main(int argc, char** argv) {
  using namespace gradops;
  if (const int wrong = CheckReference(); wrong != 0) {
    std::printf("%d expected results are wrong\n", wrong);
    return 1;
  }
  std::vector<std::string> names(argv + 1, argv + argc);
  if (names.empty()) names = {"f32", "bf16", "f16", "f64"};
  int calls = 0;
  for (const std::string& name : names) {
    if (name == "f32") {
      calls += RunAll<float>();
    } else if (name == "bf16") {
      calls += RunAll<BFloat16>();
    } else if (name == "f16") {
      calls += RunAll<Half>();
    } else if (name == "f64") {
      calls += RunAll<double>();
    } else if (name != "reference") {
      std::printf("unknown %s\n", name.c_str());
      return 2;
    }
  }
  std::printf("ran everything that was asked for: %d calls\n", calls);
  return 0;
}
