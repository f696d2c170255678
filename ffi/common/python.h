// What extension modules say about the handlers of a list of ops.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>
#include <vector>

#include "common/signature.h"

namespace gradops {

inline nanobind::str ToPython(std::string_view text) {
  return nanobind::str(text.data(), text.size());
}

inline nanobind::list ToPython(const std::vector<Signature::Array>& arrays) {
  constexpr const char* kDtypes[] = {"x", "accum", "any float", "int32"};
  nanobind::list list;
  for (const auto& array : arrays) {
    nanobind::dict fields;
    fields["name"] = ToPython(array.name);
    fields["axes"] = ToPython(array.axes);
    fields["dtype"] = kDtypes[static_cast<int>(array.dtype)];
    fields["optional"] = array.presence == Presence::kOptional;
    fields["in_place_of"] = ToPython(array.in_place_of);
    list.append(fields);
  }
  return list;
}

// A declaration (common/signature.h) as a dictionary.
inline nanobind::dict ToPython(const Signature& signature) {
  constexpr const char* kTypes[] = {"bool", "int64", "float64"};
  constexpr const char* kRules[] = {"both or none", "one of", "needs", "not both"};
  nanobind::dict attributes;
  for (const auto& attribute : signature.attributes) {
    attributes[ToPython(attribute.name)] = kTypes[static_cast<int>(attribute.type)];
  }
  nanobind::list rules;
  for (const auto& rule : signature.rules) {
    rules.append(nanobind::make_tuple(ToPython(rule.first), kRules[rule.kind],
                                      ToPython(rule.second), ToPython(rule.when)));
  }
  nanobind::dict fields;
  fields["operands"] = ToPython(signature.operands);
  fields["results"] = ToPython(signature.results);
  fields["attributes"] = attributes;
  fields["rules"] = rules;
  fields["workspace"] = signature.workspace;
  fields["variadic"] = signature.variadic;
  return fields;
}

// Defines registrations(), which returns the handlers by name, and signatures(), which returns
// their declarations by name.
template <class Context, class Ops>
void BindHandlers(nanobind::module_& m, Ops ops) {
  m.def("registrations", [ops] {
    nanobind::dict handlers;
    for (const NamedHandler& handler : HandlersOf<Context>(ops)) {
      handlers[handler.name] = nanobind::capsule(reinterpret_cast<void*>(handler.call));
    }
    return handlers;
  });
  m.def("signatures", [ops] {
    nanobind::dict signatures;
    for (const Signature& signature : SignaturesOf(ops)) {
      signatures[ToPython(signature.name)] = ToPython(signature);
    }
    return signatures;
  });
}

}  // namespace gradops
