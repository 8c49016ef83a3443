// C entry points around an engine.
#include "problem_fields.h"

static const modelnew::Engine& kEngine = modelnew::ENGINE;
static modelnew::Operator as_operator(int op) { return static_cast<modelnew::Operator>(op); }
extern "C" {
const char* engine_refusal(int op, const int64_t* fields) {
  return kEngine.refusal(make_problem(fields), as_operator(op));
}
int64_t engine_workspace_bytes(int op, const int64_t* fields) {
  return kEngine.workspace_bytes(make_problem(fields), as_operator(op), modelnew::Pointers{});
}
const char* engine_describe(int op, const int64_t* fields) {
  static char text[512];
  kEngine.describe(make_problem(fields), as_operator(op), text, sizeof text);
  return text;
}
int engine_launch(int op, const int64_t* fields, void* const* pointers) {
  const modelnew::Pointers all = {pointers[0], pointers[1], pointers[2], pointers[3], pointers[4], pointers[5]};
  return kEngine.launch(as_operator(op), make_problem(fields), all, nullptr);
}
const char* simt_message() { return simt::message.c_str(); }
const char* simt_launched() {
  static std::string names;
  names.clear();
  for (const std::string& name : simt::launched) names += name + "\n";
  return names.c_str();
}
void simt_ignore_barrier(int line) { simt::ignored_barrier = line; }
void simt_seed(int seed) { simt::shuffler.seed(seed); }
}
