// A Python module that tells how the CUDA kernels split their work. It needs no GPU and no CUDA.
//
// Each function takes the fields of a task (and for norms, of limits) as keyword arguments, by
// their names in plan.h. It returns the kernel, its file, and the plan's numbers with
// their meanings.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "common/description.h"
#include "cuda/batch_norm/bundle_plan.h"
#include "cuda/batch_norm/plan.h"
#include "cuda/clip/plan.h"
#include "cuda/cross_entropy/plan.h"
#include "cuda/gelu/plan.h"
#include "cuda/row_norm/plan.h"

namespace nb = nanobind;

namespace gradops {
namespace {

// Sets a member, or a member of a member.
template <auto kMember, auto... kRest>
void Set(auto& object, std::int64_t value) {
  auto& member = object.*kMember;
  if constexpr (sizeof...(kRest) > 0) {
    Set<kRest...>(member, value);
  } else {
    member = static_cast<std::remove_reference_t<decltype(member)>>(value);
  }
}

template <class Choice>
struct Field {
  std::string_view name;
  void (*set)(Choice&, std::int64_t);
};

// A task, the direction, and what a test forces.
struct RowChoice {
  bool backward = false;
  RowTask task{};
  RowPlanLimits limits;

  Description Choose() const {
    return backward ? Describe(ChooseBackwardPlan(task, limits))
                    : Describe(ChooseForwardPlan(task, limits));
  }
};
struct ChannelChoice {
  ChannelTask task{};
  Description Choose() const { return Describe(ChooseBatchNormPlan(task)); }
};
struct BundleChoice {
  ChannelTask task{};
  Description Choose() const { return Describe(ChooseBundlePlan(task)); }
};
// What the plan of batch norm gives the blocks, over all tiles, for tests.
struct ChannelCoverage {
  ChannelTask task{};
  Description Choose() const {
    const ChannelPlan plan = ChooseBatchNormPlan(task).channels;
    std::vector<std::int64_t> steps(static_cast<std::size_t>(plan.all_tiles)), parts = steps;
    std::int64_t evict_first = 0;
    for (int block = 0; block < plan.blocks; ++block) {
      const BlockSteps of_block = plan.StepsOfBlock(block);
      for (int i = 0; i < of_block.parts; ++i) {
        const ChannelPart part = plan.PartOf(of_block, i);
        steps[static_cast<std::size_t>(part.tile)] += part.count;
        parts[static_cast<std::size_t>(part.tile)] += 1;
        evict_first += plan.EvictFirstSteps(part);
      }
    }
    return {"",
            "",
            {{"evict_first_steps", evict_first, "steps that the L2 cache need not keep"},
             {"least_steps", std::ranges::min(steps), "the least steps of a tile"},
             {"most_steps", std::ranges::max(steps), "the most steps of a tile"},
             {"most_parts", std::ranges::max(parts), "the most blocks of a tile"}}};
  }
};
struct GeluChoice {
  bool backward = false;
  GeluTask task{};
  Description Choose() const {
    return Describe(backward ? ChooseGeluBackwardPlan(task) : ChooseGeluForwardPlan(task));
  }
};
struct ClipChoice {
  bool scales = false;
  ClipTask task{};
  Description Choose() const {
    return Describe(scales ? ChooseScalePlan(task) : ChooseSumPlan(task));
  }
};
struct CrossEntropyChoice {
  CrossEntropyTask task{};
  Description Choose() const { return Describe(ChooseCrossEntropyPlan(task)); }
};

template <class Choice, auto... kPath>
constexpr Field<Choice> OfTask(std::string_view name) {
  return {name, &Set<&Choice::task, kPath...>};
}

constexpr Field<RowChoice> kRowFields[] = {
    {"backward", &Set<&RowChoice::backward>},
    OfTask<RowChoice, &RowTask::rows>("rows"),
    OfTask<RowChoice, &RowTask::features>("features"),
    OfTask<RowChoice, &RowTask::element_bytes>("element_bytes"),
    OfTask<RowChoice, &RowTask::arrays>("arrays"),
    OfTask<RowChoice, &RowTask::aligned>("aligned"),
    OfTask<RowChoice, &RowTask::aligned_params>("aligned_params"),
    OfTask<RowChoice, &RowTask::architecture>("architecture"),
    OfTask<RowChoice, &RowTask::multiprocessors>("multiprocessors"),
    OfTask<RowChoice, &RowTask::shared_bytes>("shared_bytes"),
    OfTask<RowChoice, &RowTask::centered>("centered"),
    OfTask<RowChoice, &RowTask::residual_bias>("residual_bias"),
    OfTask<RowChoice, &RowTask::groups>("groups"),
    OfTask<RowChoice, &RowTask::sums>("sums"),
    OfTask<RowChoice, &RowTask::sums_dx>("sums_dx"),
    OfTask<RowChoice, &RowTask::reads_mean>("reads_mean"),
    OfTask<RowChoice, &RowTask::knows_epsilon>("knows_epsilon"),
    {"limit_architecture", &Set<&RowChoice::limits, &RowPlanLimits::architecture>},
    {"max_cluster", &Set<&RowChoice::limits, &RowPlanLimits::max_cluster>},
    {"max_threads", &Set<&RowChoice::limits, &RowPlanLimits::max_threads>},
    {"max_stages", &Set<&RowChoice::limits, &RowPlanLimits::max_stages>},
    {"stream", &Set<&RowChoice::limits, &RowPlanLimits::stream>},
    {"vectors", &Set<&RowChoice::limits, &RowPlanLimits::vectors>},
};

template <class Choice>
constexpr Field<Choice> kChannelFields[] = {
    OfTask<Choice, &ChannelTask::backward>("backward"),
    OfTask<Choice, &ChannelTask::groups>("groups"),
    OfTask<Choice, &ChannelTask::rows>("rows"),
    OfTask<Choice, &ChannelTask::channels>("channels"),
    OfTask<Choice, &ChannelTask::inner>("inner"),
    OfTask<Choice, &ChannelTask::bundle>("bundle"),
    OfTask<Choice, &ChannelTask::element_bytes>("element_bytes"),
    OfTask<Choice, &ChannelTask::accum_bytes>("accum_bytes"),
    OfTask<Choice, &ChannelTask::aligned>("aligned"),
    OfTask<Choice, &ChannelTask::statistics>("statistics"),
    OfTask<Choice, &ChannelTask::apply>("apply"),
    OfTask<Choice, &ChannelTask::transient_arrays>("transient_arrays"),
    OfTask<Choice, &ChannelTask::partial_rows>("partial_rows"),
    OfTask<Choice, &ChannelTask::device, &ChannelDevice::multiprocessors>("multiprocessors"),
    OfTask<Choice, &ChannelTask::device, &ChannelDevice::shared_bytes>("shared_bytes"),
    OfTask<Choice, &ChannelTask::device, &ChannelDevice::l2_bytes>("l2_bytes"),
    OfTask<Choice, &ChannelTask::device, &ChannelDevice::clusters>("clusters"),
    OfTask<Choice, &ChannelTask::device, &ChannelDevice::prefers_separate>("prefers_separate"),
};

constexpr Field<GeluChoice> kGeluFields[] = {
    {"backward", &Set<&GeluChoice::backward>},
    OfTask<GeluChoice, &GeluTask::shape, &RowShape::groups>("groups"),
    OfTask<GeluChoice, &GeluTask::shape, &RowShape::rows>("rows"),
    OfTask<GeluChoice, &GeluTask::shape, &RowShape::features>("features"),
    OfTask<GeluChoice, &GeluTask::element_bytes>("element_bytes"),
    OfTask<GeluChoice, &GeluTask::aligned>("aligned"),
    OfTask<GeluChoice, &GeluTask::has_columns>("has_columns"),
    OfTask<GeluChoice, &GeluTask::partial_rows>("partial_rows"),
    OfTask<GeluChoice, &GeluTask::multiprocessors>("multiprocessors"),
};

constexpr Field<ClipChoice> kClipFields[] = {
    {"scales", &Set<&ClipChoice::scales>},
    OfTask<ClipChoice, &ClipTask::chunks>("chunks"),
    OfTask<ClipChoice, &ClipTask::groups>("groups"),
    OfTask<ClipChoice, &ClipTask::workspace_doubles>("workspace_doubles"),
    OfTask<ClipChoice, &ClipTask::multiprocessors>("multiprocessors"),
};

constexpr Field<CrossEntropyChoice> kCrossEntropyFields[] = {
    OfTask<CrossEntropyChoice, &CrossEntropyTask::shape, &RowShape::groups>("groups"),
    OfTask<CrossEntropyChoice, &CrossEntropyTask::shape, &RowShape::rows>("rows"),
    OfTask<CrossEntropyChoice, &CrossEntropyTask::shape, &RowShape::features>("features"),
    OfTask<CrossEntropyChoice, &CrossEntropyTask::element_bytes>("element_bytes"),
    OfTask<CrossEntropyChoice, &CrossEntropyTask::backward>("backward"),
    OfTask<CrossEntropyChoice, &CrossEntropyTask::multiprocessors>("multiprocessors"),
    OfTask<CrossEntropyChoice, &CrossEntropyTask::has_clusters>("has_clusters"),
};

nb::dict ToPython(const Description& description) {
  nb::dict numbers;
  for (const auto& [name, value, meaning] : description.numbers) {
    numbers[name] = nb::make_tuple(value, meaning);
  }
  nb::dict fields;
  fields["kernel"] = description.kernel;
  fields["file"] = "ffi/cuda/" + description.file;
  fields["numbers"] = numbers;
  return fields;
}

// Defines a function of Python that fills a choice, chooses a plan and describes it.
template <class Choice, std::size_t kFields>
void Define(nb::module_& m, const char* name, const Field<Choice> (&fields)[kFields]) {
  m.def(name, [name, &fields](const nb::kwargs& given) {
    Choice choice;
    for (const auto& [key, value] : given) {
      const std::string wanted = nb::cast<std::string>(key);
      const auto field = std::ranges::find(fields, wanted, &Field<Choice>::name);
      if (field == std::end(fields)) {
        throw nb::type_error((std::string(name) + " has no argument " + wanted).c_str());
      }
      field->set(choice, nb::cast<std::int64_t>(nb::int_(nb::borrow(value))));
    }
    return ToPython(choice.Choose());
  });
}

}  // namespace
}  // namespace gradops

NB_MODULE(_plans, m) {
  gradops::Define(m, "row_norm_plan", gradops::kRowFields);
  gradops::Define(m, "batch_norm_plan", gradops::kChannelFields<gradops::ChannelChoice>);
  gradops::Define(m, "batch_norm_coverage", gradops::kChannelFields<gradops::ChannelCoverage>);
  gradops::Define(m, "bundle_plan", gradops::kChannelFields<gradops::BundleChoice>);
  gradops::Define(m, "gelu_plan", gradops::kGeluFields);
  gradops::Define(m, "clip_plan", gradops::kClipFields);
  gradops::Define(m, "cross_entropy_plan", gradops::kCrossEntropyFields);
}
