// A Python module that tells how the CUDA kernels split their work. It needs no GPU and no CUDA.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cuda/batch_norm/policy.h"
#include "cuda/gelu/policy.h"
#include "cuda/row_norm/backward_policy.h"
#include "cuda/row_norm/narrow_policy.h"

namespace nb = nanobind;

namespace gradops {
namespace {

// Reads layer norm's choice of a plan on GPUs, and forces a choice.
void BindRowPlans(nb::module_& m) {
  m.def(
      "row_plan",
      [](std::int64_t rows, std::int64_t features, int element_bytes, int arrays, bool backward,
         bool aligned, bool aligned_params, int architecture, int multiprocessors,
         std::int64_t shared_bytes, bool sums_dx, bool centered) {
        const RowTask task{rows,         features,       element_bytes, arrays,
                           aligned,      aligned_params, architecture,  multiprocessors,
                           shared_bytes, sums_dx,        centered};
        const NarrowExtra extra =
            backward ? NarrowBackwardExtra(task) : NarrowForwardExtra(task, true);
        nb::dict fields;
        const auto describe = [&](const auto& plan) {
          fields["stream"] = plan.stream;
          if (plan.stream) return;
          fields["division"] = static_cast<int>(plan.division);
          fields["packs"] = plan.packs;
          fields["lanes"] = plan.lanes;
          fields["cluster"] = plan.cluster;
          fields["share"] = plan.share;
          fields["threads"] = plan.threads();
          if constexpr (std::is_same_v<std::decay_t<decltype(plan)>, BackwardPlan>) {
            fields["units"] = plan.units;
            fields["stages"] = plan.stages;
            fields["shared_bytes"] = plan.shared_bytes;
            fields["classes"] = plan.classes;
          } else {
            fields["teams"] = plan.teams;
            fields["step"] = plan.step;
            fields["stages"] = plan.stages;
            fields["shared_bytes"] = plan.shared_bytes;
          }
          const NarrowPlan narrow =
              plan.division == Division::kFramed ? ChooseNarrowPlan(task, extra) : NarrowPlan{};
          if (narrow.lanes == 0) return;
          nb::dict chunk;
          chunk["lanes"] = narrow.lanes;
          chunk["columns"] = narrow.columns;
          chunk["steps"] = narrow.steps;
          chunk["chunk_rows"] = narrow.chunk_rows;
          chunk["slot_bytes"] = narrow.slot_bytes;
          chunk["warps"] = narrow.warps;
          chunk["shared_bytes"] = narrow.shared_bytes;
          fields["narrow"] = chunk;
        };
        if (backward) {
          describe(ChooseBackwardPlan(task, RowOverride()));
        } else {
          describe(ChooseForwardPlan(task, RowOverride()));
        }
        return fields;
      },
      nb::kw_only(), nb::arg("rows"), nb::arg("features"), nb::arg("element_bytes"),
      nb::arg("arrays"), nb::arg("backward"), nb::arg("aligned"), nb::arg("aligned_params"),
      nb::arg("architecture"), nb::arg("multiprocessors"), nb::arg("shared_bytes"),
      nb::arg("sums_dx") = false, nb::arg("centered") = true);
}

// Reads how GELU cuts its arrays on GPUs.
inline nb::dict FieldsOf(const GeluCut& cut, std::int64_t rows) {
  nb::dict fields;
  fields["span"] = cut.span;
  fields["copies"] = cut.copies;
  fields["spans"] = cut.spans;
  fields["tiles"] = cut.tiles;
  fields["slices"] = cut.slices;
  fields["lanes"] = cut.lanes;
  fields["inverse_lanes"] = cut.inverse_lanes;
  fields["at_once"] = cut.at_once;
  fields["turns"] = cut.turns;
  fields["partial_rows"] = cut.partial_rows(rows);
  return fields;
}

void BindGeluCuts(nb::module_& m) {
  m.def(
      "gelu_forward_cut",
      [](std::int64_t groups, std::int64_t rows, std::int64_t features, int width, int turns,
         std::int64_t resident) {
        return FieldsOf(
            CutForward({groups, rows, features}, width, /*has_columns=*/true, turns, resident),
            rows);
      },
      nb::kw_only(), nb::arg("groups"), nb::arg("rows"), nb::arg("features"), nb::arg("width"),
      nb::arg("turns"), nb::arg("resident"));
  m.def(
      "gelu_cut",
      [](std::int64_t groups, std::int64_t rows, std::int64_t features, int width,
         int element_bytes, std::int64_t partial_rows, std::int64_t resident) {
        return FieldsOf(CutBackward({groups, rows, features}, width, element_bytes,
                                    /*has_columns=*/true, partial_rows, resident),
                        rows);
      },
      nb::kw_only(), nb::arg("groups"), nb::arg("rows"), nb::arg("features"), nb::arg("width"),
      nb::arg("element_bytes"), nb::arg("partial_rows"), nb::arg("resident"));
}

// Reads batch norm's choice of a plan on GPUs.
void BindChannelPlans(nb::module_& m) {
  m.def(
      "channel_plan",
      [](std::int64_t groups, std::int64_t rows, std::int64_t channels, std::int64_t inner,
         int element_bytes, bool aligned, bool backward, bool residual, std::int64_t partial_rows,
         int multiprocessors, std::int64_t shared_bytes, std::int64_t l2_bytes) {
        const ChannelPlan plan =
            ChooseChannelPlan({.needs = backward ? kBackwardNeeds : kForwardNeeds,
                               .groups = groups,
                               .rows = rows,
                               .channels = channels,
                               .inner = inner,
                               .element_bytes = element_bytes,
                               .accum_bytes = std::max(4, element_bytes),
                               .aligned = aligned,
                               .statistics = true,
                               .apply = true,
                               .apart = false,
                               .other_arrays = residual ? 1 : 0,
                               .partial_rows = partial_rows,
                               .multiprocessors = multiprocessors,
                               .shared_bytes = shared_bytes,
                               .l2_bytes = l2_bytes});
        nb::dict fields;
        fields["plane"] = plan.plane;
        fields["width"] = plan.width;
        fields["lanes"] = plan.lanes;
        fields["at_once"] = plan.at_once;
        fields["fold"] = plan.fold;
        fields["tile_channels"] = plan.tile_channels;
        fields["tiles"] = plan.tiles;
        fields["steps"] = plan.steps;
        fields["stride"] = plan.stride;
        fields["blocks"] = plan.blocks;
        fields["shared_bytes"] = plan.shared_bytes;
        fields["shared_rings"] = plan.shared_rings;
        fields["given_rings"] = plan.given_rings;
        fields["own_sums"] = plan.own_sums;
        fields["row_slots"] = plan.row_slots;
        fields["ring_steps"] = plan.ring_steps;
        fields["cached_steps"] = plan.cached_steps;
        fields["slots"] = plan.slot_bytes / (plan.width * element_bytes);
        // Over all blocks: the steps of each tile, and the blocks that have a part of the tile.
        std::vector<std::int64_t> steps(static_cast<std::size_t>(plan.all_tiles)), parts = steps;
        std::int64_t passing = 0;
        for (int block = 0; block < plan.blocks; ++block) {
          const ChannelShare share = plan.ShareOf(block);
          for (int i = 0; i < share.parts; ++i) {
            const ChannelPart part = plan.PartOf(share, i);
            steps[static_cast<std::size_t>(part.tile)] += part.count;
            parts[static_cast<std::size_t>(part.tile)] += 1;
            passing += plan.PassingSteps(part);
          }
        }
        fields["passing_steps"] = passing;
        fields["least_steps"] = *std::min_element(steps.begin(), steps.end());
        fields["most_steps"] = *std::max_element(steps.begin(), steps.end());
        fields["most_parts"] = *std::max_element(parts.begin(), parts.end());
        return fields;
      },
      nb::kw_only(), nb::arg("groups"), nb::arg("rows"), nb::arg("channels"), nb::arg("inner"),
      nb::arg("element_bytes"), nb::arg("aligned"), nb::arg("backward"), nb::arg("residual"),
      nb::arg("partial_rows"), nb::arg("multiprocessors"), nb::arg("shared_bytes"),
      nb::arg("l2_bytes"));
}

}  // namespace
}  // namespace gradops

NB_MODULE(_plans, m) {
  gradops::BindRowPlans(m);
  gradops::BindChannelPlans(m);
  gradops::BindGeluCuts(m);
}
