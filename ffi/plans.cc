// A Python module that tells how the CUDA kernels split their work. It needs no GPU and no CUDA.
//
// Each function takes the fields of a task (and for norms, of limits) as keyword arguments, by
// their names in plan.h. It returns the kernel's name and the plan's numbers as a dictionary.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <type_traits>

#include "common/description.h"
#include "cuda/batch_norm/plan.h"
#include "cuda/clip/plan.h"
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

constexpr Field<ChannelChoice> kChannelFields[] = {
    OfTask<ChannelChoice, &ChannelTask::backward>("backward"),
    OfTask<ChannelChoice, &ChannelTask::groups>("groups"),
    OfTask<ChannelChoice, &ChannelTask::rows>("rows"),
    OfTask<ChannelChoice, &ChannelTask::channels>("channels"),
    OfTask<ChannelChoice, &ChannelTask::inner>("inner"),
    OfTask<ChannelChoice, &ChannelTask::element_bytes>("element_bytes"),
    OfTask<ChannelChoice, &ChannelTask::accum_bytes>("accum_bytes"),
    OfTask<ChannelChoice, &ChannelTask::aligned>("aligned"),
    OfTask<ChannelChoice, &ChannelTask::statistics>("statistics"),
    OfTask<ChannelChoice, &ChannelTask::apply>("apply"),
    OfTask<ChannelChoice, &ChannelTask::transient_arrays>("transient_arrays"),
    OfTask<ChannelChoice, &ChannelTask::partial_rows>("partial_rows"),
    OfTask<ChannelChoice, &ChannelTask::device, &ChannelDevice::multiprocessors>("multiprocessors"),
    OfTask<ChannelChoice, &ChannelTask::device, &ChannelDevice::shared_bytes>("shared_bytes"),
    OfTask<ChannelChoice, &ChannelTask::device, &ChannelDevice::l2_bytes>("l2_bytes"),
    OfTask<ChannelChoice, &ChannelTask::device, &ChannelDevice::clusters>("clusters"),
    OfTask<ChannelChoice, &ChannelTask::device, &ChannelDevice::prefers_separate>(
        "prefers_separate"),
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

nb::dict ToPython(const Description& description) {
  nb::dict fields;
  fields["kernel"] = description.kernel;
  for (const auto& [name, value] : description.numbers) fields[name] = value;
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
      field->set(choice, nb::cast<std::int64_t>(value));
    }
    return ToPython(choice.Choose());
  });
}

}  // namespace
}  // namespace gradops

NB_MODULE(_plans, m) {
  gradops::Define(m, "row_norm_plan", gradops::kRowFields);
  gradops::Define(m, "batch_norm_plan", gradops::kChannelFields);
  gradops::Define(m, "gelu_plan", gradops::kGeluFields);
  gradops::Define(m, "clip_plan", gradops::kClipFields);
}
