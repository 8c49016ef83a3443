// C entry points around the planner in whose namespace this is included, and what else all plan checks share.
#pragma once
#include "engines.cuh"
#include "problem_fields.h"

// No other engine takes anything.
namespace modelnew {
static const char* refuse_all(const Problem&, Operator) { return "everything"; }
#define IDLE(name) const Engine name{#name, refuse_all, nullptr, nullptr, nullptr};
IDLE(kGatherEngine) IDLE(kWgmmaEngine) IDLE(kStemEngine) IDLE(kPointwiseEngine) IDLE(kMmaEngine) IDLE(kTmaEngine)
IDLE(kWgradEngine) IDLE(kDirectEngine)
#undef IDLE
bool direct_has_points(const Problem&, Operator) { return false; }
bool gather_lands(const Problem&, Operator) { return false; }
int64_t listed_workspace_bytes(const Problem&, Operator) { return 12345; }
}  // namespace modelnew

static std::set<std::string> seen;  // kinds of plans
static const int kSms = 132;

inline modelnew::Operator as_operator(int op) { return static_cast<modelnew::Operator>(op); }

// Whether tiles of this size have all, and each of them some.
inline bool covers(int64_t tiles, int64_t size, int64_t all) { return tiles * size >= all && (tiles - 1) * size < all; }

// Whether every one has an owner, and only one.
template <class Owners>
bool once_each(const Owners& owners) {
  return std::all_of(owners.begin(), owners.end(), [](int64_t times) { return times == 1; });
}

// Tiles to look at closely: the first one, the last one and a few at random.
inline std::vector<int> some_of(int64_t tiles, int count, std::mt19937& random) {
  std::vector<int> numbers{0, static_cast<int>(tiles - 1)};
  while (static_cast<int>(numbers.size()) < count) numbers.push_back(static_cast<int>(random() % tiles));
  return numbers;
}

// What is wrong, for the caller to keep: null without a plan.
inline const char* told(const std::string& fault, const std::string& where) {
  static std::string text;
  text = fault.empty() ? fault : fault + ", " + where;
  return text.c_str();
}

extern "C" {
void set_capability(int capability) { stand_in_capability = capability; }
const char* plan_refusal(int op, const int64_t* fields) { return refusal(make_problem(fields), as_operator(op)); }
// Whole, and in the 320 bytes that the binding has for it.
const char* plan_describe(int op, const int64_t* fields) {
  static char text[321];
  std::memset(text, 'x', sizeof text);
  describe(make_problem(fields), as_operator(op), text, 320);
  return text[320] == 'x' && std::memchr(text, 0, 319) ? text : "written too far";
}
const char* plan_seen() {
  static std::string all;
  all.clear();
  for (const std::string& kind : seen) all += kind + "\n";
  return all.c_str();
}
}
