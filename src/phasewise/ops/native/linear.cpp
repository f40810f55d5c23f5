// Linear layers, whatever forms their weights have: this is where the form of a part is looked up.
#include "forms.h"
#include "parts.h"

static const Form* const FORMS[WEIGHTS_LEVELS] = {&BFLOAT16_FORM, &INT8_FORM};  // as WeightForm numbers them
static const Inputs* const INPUTS[INPUTS_KINDS] = {  // as InputsKind does
    &BFLOAT16_INPUTS, &INT8_INPUTS,     &PAIRS_INPUTS,    &NIBBLES_INPUTS,
    &BYTES_32_INPUTS, &BYTES_64_INPUTS, &BYTES_128_INPUTS};

static const Form& form_at(long form) {
  return form < WEIGHTS_LEVELS ? *FORMS[form] : LEVEL_FORMS[form - WEIGHTS_LEVELS];
}
static const Form& form_of(const WeightsPart& part) { return form_at(part.form); }

static long lines(long bytes) { return (bytes + 63) / 64 * 64; }

// Where the inputs of each kind that some part takes lie in the room of a call; returns the end.
static long places_of(const LinearCall& call, long (&place)[INPUTS_KINDS]) {
  const Weights& w = *call.weights;
  bool taken[INPUTS_KINDS] = {};
  for (long i = 0; i < w.count; i++) taken[form_of(w.parts[i]).inputs] = true;
  long at = 0;
  for (long kind = 0; kind < INPUTS_KINDS; kind++) {
    place[kind] = taken[kind] ? at : -1;
    if (taken[kind]) at += lines(INPUTS[kind]->room(call));
  }
  return at;
}

long linear_room(const LinearCall& call) {
  long place[INPUTS_KINDS];
  return places_of(call, place);
}

long linear_most_room(const LinearCall& call) {
  long all = 0;
  for (const Inputs* inputs : INPUTS) all += lines(inputs->room(call));
  return all;
}

void linear_inputs(const LinearCall& call, void* room, int thread, int all) {
  long place[INPUTS_KINDS];
  if (!places_of(call, place)) return;
  for (long kind = 0; kind < INPUTS_KINDS; kind++)
    if (place[kind] >= 0) INPUTS[kind]->prepare(call, (char*)room + place[kind], thread, all);
}

void linear_product(const LinearCall& call, void* room, Shares* shares, int thread) {
  const Weights& w = *call.weights;
  long place[INPUTS_KINDS], first = 0, before = 0;
  places_of(call, place);
  Numbers numbers{shares};
  for (long i = 0; i < w.count; i++) {
    const WeightsPart& part = w.parts[i];
    const Form& form = form_of(part);
    form.multiply({call, part, first, (const char*)room + place[form.inputs], numbers, before, thread});
    first += part.outputs, before += panels(part.outputs);
  }
}

void linear_part(const LinearCall& call, void* room, Shares* shares, int thread, int all) {
  linear_inputs(call, room, thread, all);
  if (linear_room(call)) wait_for_all(all);
  linear_product(call, room, shares, thread);
}

void linear_row(const Weights& w, long which, bf16* out) {
  const WeightsPart* part = w.parts;
  for (; which >= part->outputs; part++) which -= part->outputs;
  form_of(*part).row(*part, w.inputs, which, out);
}

API void linear(const LinearCall* call) {
  int threads = enough(call->threads, call->rows * call->weights->outputs * call->weights->inputs);
  void* room = scratch(OF_LINEAR, linear_room(*call));
  Shares shares(panels(*call->weights), threads);
  together(threads, [&](int thread, int all) { linear_part(*call, room, &shares, thread, all); });
}

API int64_t panel_bytes(int64_t form, int64_t inputs) { return form_at(form).panel_bytes(inputs); }

// Rows of a weight [outputs, inputs] -> what the part holds
API void linear_pack(const Rows* weight, const WeightsPart* to, int64_t inputs, int64_t threads) {
  form_of(*to).pack(*weight, *to, inputs, (int)threads);
}

// Rows `which` of the weight, [count, inputs]: the way back, and the embedding table of a model that ties it.
// Returns 1, and nothing else is done, if one of them is not there.
API int64_t linear_rows(const Weights* w, const int64_t* which, int64_t count, bf16* out, int64_t threads) {
  for (long i = 0; i < count; i++)
    if (which[i] < 0 || which[i] >= w->outputs) return 1;
  together(enough(threads, count * w->inputs), [&](int thread, int all) {
    for (long i = thread; i < count; i += all) linear_row(*w, which[i], out + i * w->inputs);
  });
  return 0;
}
