// How the structures of kernels.h lie in this library, one line for each: name, size, then every field and its offset.
// Python compares this with abi.py before it calls anything, so neither side can change alone.
#include <stddef.h>

#include <string>

#include "kernels.h"

namespace {

struct Field {
  const char* name;
  size_t offset;
};

template <size_t N> void add(std::string& text, const char* name, size_t size, const Field (&fields)[N]) {
  text += name;
  text += " " + std::to_string(size);
  for (const Field& field : fields) text += " " + std::string(field.name) + " " + std::to_string(field.offset);
  text += "\n";
}

#define F(name) {#name, offsetof(S, name)}
#define STRUCTURE(name, ...)                    \
  do {                                          \
    using S = name;                             \
    const Field fields[] = {__VA_ARGS__};       \
    add(text, #name, sizeof(S), fields);        \
  } while (0)

std::string describe() {
  std::string text;
  STRUCTURE(Rows, F(data), F(stride), F(kind));
  STRUCTURE(WeightsPart, F(form), F(packed), F(scales), F(outputs), F(whole));
  STRUCTURE(Weights, F(parts), F(count), F(bias), F(outputs), F(inputs));
  STRUCTURE(LinearCall, F(weights), F(x), F(add), F(y), F(rows), F(threads), F(best), F(cap));
  STRUCTURE(Sight, F(window), F(sinks), F(far), F(seats), F(block), F(bias));
  STRUCTURE(Sealed, F(levels), F(step), F(low), F(levels_head), F(ends_head), F(slots), F(rows), F(bits), F(group),
            F(left), F(right), F(left_head), F(right_head), F(rank), F(apart), F(places), F(apart_head), F(aparts),
            F(upper), F(scale), F(rest), F(rest_step), F(rest_low), F(rest_bits), F(rest_rows));
  STRUCTURE(Sides, F(keys), F(values));
  STRUCTURE(Seal, F(rows), F(row_head), F(to));
  STRUCTURE(SealCall, F(seals), F(count), F(heads), F(dim), F(by_channel), F(threads), F(slots), F(rows),
            F(blocks));
  STRUCTURE(Head, F(k), F(v), F(k_scale), F(v_scale), F(begin), F(window), F(sinks));
  STRUCTURE(Places, F(at), F(first));
  STRUCTURE(Tempered, F(noisy), F(seed), F(row), F(inverse), F(places));
  STRUCTURE(Line, F(from), F(begin), F(length));
  STRUCTURE(Tally, F(lines), F(heads), F(gone), F(weights), F(scores), F(tempered), F(layer));
  STRUCTURE(Span, F(q), F(k), F(v), F(out), F(lse), F(q_row), F(k_head), F(k_row), F(v_head), F(v_row), F(n),
            F(rows), F(sees), F(common), F(k_scale), F(v_scale), F(k_scale_head), F(v_scale_head), F(sight),
            F(first), F(sealed), F(heads), F(tally), F(shared), F(shared_slots));
  STRUCTURE(Common, F(spans), F(count), F(from), F(to), F(level));
  STRUCTURE(AttentionCall, F(spans), F(count), F(heads_q), F(heads), F(dim), F(kind), F(window), F(threads),
            F(scale), F(commons), F(common_count), F(softcap), F(sink_scores));
  STRUCTURE(Listed, F(q), F(k), F(v), F(out), F(q_row), F(k_head), F(k_row), F(v_head), F(v_row), F(rows), F(count),
            F(slots), F(k_scale), F(v_scale), F(k_scale_head), F(v_scale_head), F(held), F(rest));
  STRUCTURE(ListedCall, F(spans), F(count), F(heads_q), F(heads), F(dim), F(kind), F(threads), F(scale));
  STRUCTURE(Pages, F(q), F(low), F(high), F(low_head), F(high_head), F(pages), F(size), F(chosen), F(own), F(n),
            F(slots));
  STRUCTURE(PagesCall, F(spans), F(count), F(heads_q), F(heads), F(dim), F(kind), F(threads));
  STRUCTURE(PrefillCall, F(q), F(k), F(v), F(out), F(q_row), F(q_head), F(k_head), F(k_row), F(v_head), F(v_row),
            F(n), F(rows), F(heads_q), F(heads), F(dim), F(kind), F(threads), F(scale), F(k_scale), F(v_scale),
            F(k_scale_head), F(v_scale_head), F(softcap), F(sight), F(sees), F(sees_head), F(sees_row), F(lse),
            F(unequal), F(shared), F(shared_slots), F(sink_scores));
  STRUCTURE(Noise, F(seeds), F(rows), F(keys), F(keys_head), F(heads), F(layer));
  STRUCTURE(ReceivedCall, F(q), F(k), F(out), F(ends), F(q_row), F(q_head), F(k_head), F(k_row), F(n), F(rows),
            F(heads_q), F(heads), F(dim), F(kind), F(threads), F(window), F(scale), F(softcap), F(lse), F(noise),
            F(inverse));
  STRUCTURE(RetireCall, F(lines), F(count), F(heads), F(most), F(scores), F(gone), F(weights), F(together), F(sums),
            F(n), F(older), F(threads), F(places), F(row));
  STRUCTURE(Norm, F(weight), F(eps));
  STRUCTURE(Experts, F(router), F(products), F(count), F(top), F(renormalise), F(loads));
  STRUCTURE(Gate, F(activation), F(alpha), F(limit));
  STRUCTURE(Layer, F(before_attention), F(after_attention), F(before_mlp), F(after_mlp), F(heads), F(whole), F(qkv),
            F(o), F(gate_up), F(down), F(experts), F(gate), F(turn), F(window), F(scale), F(softcap),
            F(sink_scores));
  STRUCTURE(Turn, F(cos), F(sin), F(size));
  STRUCTURE(Embeddings, F(packed), F(plain), F(vocab), F(scale));
  STRUCTURE(LayerChoice, F(way), F(low), F(high), F(head), F(channels), F(turn), F(turned), F(line), F(sums),
            F(scale));
  STRUCTURE(Choice, F(first), F(units), F(size), F(chosen), F(rule), F(joint), F(begin), F(end), F(at), F(each),
            F(before), F(known), F(step), F(parts), F(width), F(layers), F(queries), F(lists), F(largest), F(group),
            F(beside));
  STRUCTURE(VotesSpan, F(choice), F(q), F(k), F(k_head), F(k_row), F(k_scale), F(k_scale_head), F(n), F(slots),
            F(v), F(v_head), F(v_row), F(v_scale), F(v_scale_head), F(held), F(rest));
  STRUCTURE(VotesCall, F(spans), F(count), F(heads_q), F(heads), F(dim), F(threads));
  STRUCTURE(Planes, F(k), F(v), F(head), F(k_scale), F(v_scale), F(scale_head));
  STRUCTURE(StackSpan, F(n), F(rows), F(sees), F(common), F(planes), F(done), F(window), F(sinks), F(near),
            F(beyond), F(seats), F(block), F(first), F(choice), F(sealed), F(unequal), F(tally), F(bias), F(shared),
            F(shared_slots));
  STRUCTURE(LowRank, F(down), F(up));
  STRUCTURE(Tuned, F(from), F(to), F(layers));
  STRUCTURE(StackCall, F(layers), F(embeddings), F(count), F(hidden), F(heads_q), F(heads), F(dim), F(x), F(rows),
            F(threads), F(turns), F(tokens), F(positions), F(spans), F(span_count), F(commons), F(common_count),
            F(from), F(to), F(qkv), F(read), F(far), F(tuned), F(tuned_count));
  STRUCTURE(HeadCall, F(weights), F(norm), F(cap), F(x), F(x_row), F(rows), F(threads), F(logits), F(best),
            F(masks));
  STRUCTURE(Suffixes, F(link), F(length), F(end), F(first), F(followers), F(from), F(token), F(target), F(next),
            F(table), F(mask), F(states), F(edges), F(last), F(n));
  STRUCTURE(Chain, F(most), F(shortest), F(least), F(only), F(latest), F(onlys), F(latests), F(tokens), F(likely));
  text += "WeightForm " + std::to_string(WEIGHT_FORMS) + "\n";
  return text;
}

}  // namespace

API const char* layout() {
  static const std::string text = describe();
  return text.c_str();
}
