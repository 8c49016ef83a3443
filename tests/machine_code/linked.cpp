// Every engine that the binding's table names, and what the stand-ins say where Hopper's are left out.
#include "engines.cuh"
using namespace modelnew;
const Engine* const engines[] = {ENGINES};
extern "C" const char* name_of(int engine) { return engines[engine]->name; }
extern "C" const char* refusal_of(int engine) { return engines[engine]->refusal(Problem(), Operator::kFprop); }
extern "C" bool asks_gather() {
  return gather_lands(Problem(), Operator::kFprop) || gather_takes_taps_apart(Problem(), Operator::kFprop);
}
