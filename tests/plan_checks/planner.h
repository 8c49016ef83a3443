// The frame of all plan checks: a file includes an engine, opens its namespace, includes this and defines
// check_plans().
#pragma once
#include "engines.cuh"
#include "problem_fields.h"

// All other engines refuse everything.
namespace modelnew {
static const char* refuse_all(const Problem&, Operator) { return "everything"; }
#define IDLE(name) const Engine name{#name, refuse_all, nullptr, nullptr, nullptr};
IDLE(kGatherEngine) IDLE(kWgmmaEngine) IDLE(kStemEngine) IDLE(kPointwiseEngine) IDLE(kMmaEngine) IDLE(kTmaEngine)
IDLE(kHopperWgradEngine) IDLE(kMmaWgradEngine) IDLE(kDirectEngine)
#undef IDLE
bool direct_has_points(const Problem&, Operator) { return false; }
bool direct_has_stem_dgrad(const Problem&, Operator) { return false; }
bool gather_lands(const Problem&, Operator) { return false; }
int64_t listed_workspace_bytes(const Problem&, Operator) { return 12345; }
}  // namespace modelnew

struct Fault {
  std::string text;
};
[[noreturn]] inline void fail(const char* condition, const char* file, int line) {
  throw Fault{std::string(condition) + " does not hold, " + file + ":" + std::to_string(line)};
}
// Ends the checks of a problem unless this holds.
#define CHECK(...) ((__VA_ARGS__) ? void() : fail(#__VA_ARGS__, __FILE__, __LINE__))

static std::string plan_in_hand;  // the plan that is being checked, for the message of a fault

// The text of the first check that fails, or "".
template <class Checks>
const char* fault_of(const Checks& checks) {
  static std::string text;
  text.clear();
  try {
    checks();
  } catch (const Fault& fault) {
    text = fault.text + ", " + plan_in_hand;
  }
  return text.c_str();
}

static const int kSms = 132, kSharedMemory = 232448;  // of an H100 or H200

// Conditions that some plans at random must meet and others not: then the checks have seen all kinds of plans.
static std::map<std::string, std::set<bool>> seen;
template <class Value>
void note_values(const std::string& name, const Value& value, std::initializer_list<int> all) {
  for (const int one : all) seen[name + " == " + std::to_string(one)].insert(static_cast<int>(value) == one);
}
#define NOTE(condition) seen[#condition].insert(condition)
#define NOTE_VALUES(value, ...) note_values(#value, value, {__VA_ARGS__})

inline bool within(int64_t value, int64_t size) { return value >= 0 && value < size; }
inline bool is_int(int64_t value) { return within(value, int64_t{1} << 31); }
inline bool multiples(int64_t of, std::initializer_list<int64_t> values) {
  return std::all_of(values.begin(), values.end(), [&](int64_t value) { return value % of == 0; });
}

// Whether that many tiles of a size cover everything and none of them is empty.
inline bool covers(int64_t tiles, int64_t size, int64_t all) { return tiles * size >= all && (tiles - 1) * size < all; }

// Outputs, terms or tiles, each of which must be taken once.
class Owned {
 public:
  explicit Owned(int64_t count) : owned_(count) {}
  bool take(int64_t i) { return within(i, owned_.size()) && owned_[i]++ == 0; }
  bool all() const { return std::count(owned_.begin(), owned_.end(), 1) == static_cast<int64_t>(owned_.size()); }

 private:
  std::vector<uint8_t> owned_;
};

// Whether values at these offsets are neighbours, a step apart, in runs of a length. A whole run may be absent (-1).
inline bool are_runs(const std::vector<int64_t>& offsets, int length, int64_t step = 1) {
  for (size_t i = 0; i < offsets.size(); ++i) {
    const int64_t first = offsets[i / length * length];
    if (offsets[i] != (first < 0 ? -1 : first + static_cast<int64_t>(i) % length * step)) return false;
  }
  return true;
}

// Whether TMA boxes may step by these strides: multiples of 16 bytes, which are `piece` values.
inline bool steps_of_boxes(const int64_t (&stride)[4], const int64_t (&sizes)[4], int piece,
                           std::initializer_list<int> axes) {
  return std::all_of(axes.begin(), axes.end(), [&](int i) {
    return sizes[i] == 1 || (stride[i] > 0 && stride[i] % piece == 0);
  });
}

// Tiles to look at closely: the first one, the last one and a few at random.
inline std::vector<int> some_of(int64_t tiles, int count, std::mt19937& random) {
  std::vector<int> numbers{0, static_cast<int>(tiles - 1)};
  while (static_cast<int>(numbers.size()) < count) numbers.push_back(static_cast<int>(random() % tiles));
  return numbers;
}

struct Addresses {
  uint64_t in, w, out;  // wgrad: x and dy, in bytes
};

// Checks the engine's plans for tensors at these addresses: the best one and others that a caller may ask for. Returns
// false if there is none.
static bool check_plans(const modelnew::Problem& problem, modelnew::Operator op, const Addresses& at,
                        std::mt19937& random);

// The engine's cycles(), unless a file has an overload of this.
template <class Problem>
double estimate(const Problem& problem, modelnew::Operator op) {
  return cycles(problem, op);
}

extern "C" {
void set_capability(int capability) { stand_in_capability = capability; }
const char* plan_refusal(int op, const int64_t* fields) {
  return refusal(make_problem(fields), static_cast<modelnew::Operator>(op));
}
// The description must be whole, and in the 320 bytes that the binding has for it.
const char* plan_describe(int op, const int64_t* fields) {
  static char text[321];
  std::memset(text, 'x', sizeof text);
  describe(make_problem(fields), static_cast<modelnew::Operator>(op), text, 320);
  return text[320] == 'x' && std::memchr(text, 0, 319) ? text : "written too far";
}
double plan_cycles(int op, const int64_t* fields) {
  return estimate(make_problem(fields), static_cast<modelnew::Operator>(op));
}
// Returns null without a plan, else what is wrong or "".
const char* plan_fault(int op, const int64_t* fields, uint64_t in, uint64_t w, uint64_t out, int seed) {
  std::mt19937 random(seed);
  bool any = false;
  const char* const fault = fault_of([&] {
    any = check_plans(make_problem(fields), static_cast<modelnew::Operator>(op), {in, w, out}, random);
  });
  return any || *fault ? fault : nullptr;
}
// Returns the conditions that all plans so far have met, or none.
const char* plan_unseen() {
  static std::string all;
  all.clear();
  for (const auto& [condition, values] : seen)
    if (values.size() < 2) all += condition + "\n";
  return all.c_str();
}
}
