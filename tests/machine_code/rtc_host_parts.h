// Stand-ins for the host part of the engines' headers.
namespace modelnew {
Correlation correlation_of_problem(const Problem&, Operator) { return {}; }
void flatten_points(Correlation&) {}
struct ProblemKey {};
template <class... T> ProblemKey key_of(const T&...) { return {}; }
bool direct_has_points(const Problem&, Operator) { return false; }
bool direct_has_stem_dgrad(const Problem&, Operator) { return false; }
template <class... T> bool can_multiply_contained(const T&...) { return false; }
template <class... T> cudaError_t multiply_contained(const T&...) { return {}; }
template <class... T> void describe_contained(const T&...) {}
template <class Value> struct Memo {
  Value value;
  template <class Compute> const Value& get(const ProblemKey&, const Compute& compute) { return value = compute(); }
};
}
