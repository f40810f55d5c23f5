// The plain C interface: every argument is a data pointer, or a structure of 64-bit words passed by its address.
// Strides count elements. abi.py declares the same structures for Python, and layout.cpp tells it how they lie here.
#pragma once
#include <stdint.h>

#define API extern "C" __attribute__((visibility("default")))

constexpr long WIDTH = 64;  // outputs per panel of packed weights; the last panel is filled up with zeros

inline long panels(long outputs) { return (outputs + WIDTH - 1) / WIDTH; }

constexpr int FLOAT = 0, BFLOAT = 1, BLOCKS = 2;  // the last: bytes of a file's blocks, of weights that are packed

struct Rows {  // a matrix whose rows are contiguous; data null: none
  void* data;
  int64_t stride;
  int64_t kind;
};

// How a part of a layer's weights is packed and multiplied: forms.h says what every form can do.
// From WEIGHTS_LEVELS on every kind of few bits (level_kinds.h) is two forms, for rows in bfloat16 and in int8 (levels
// that are no whole numbers: in bfloat16 both).
constexpr long LEVEL_KINDS = 28, FIRST_CODES = 19;  // the latter: the first kind with codebooks
enum WeightForm { WEIGHTS_BFLOAT16, WEIGHTS_INT8, WEIGHTS_LEVELS, WEIGHT_FORMS = WEIGHTS_LEVELS + 2 * LEVEL_KINDS };

struct WeightsPart {    // consecutive outputs of a layer that share a form, packed by `linear_pack`
  int64_t form;         // a WeightForm
  void* packed;         // panels of WIDTH outputs, of `panel_bytes` each; the part begins with a panel of its own
  const float* scales;  // int8: [panels, groups of 128 inputs, WIDTH], what one step of a weight is worth
  int64_t outputs;
  double whole;         // few bits: what all weights are multiplied with beside their scales; 0: nothing
};

struct Weights {             // of one linear layer: the outputs of its parts, one after the other
  const WeightsPart* parts;  // [count]: neighbours in a fused layer (q, k and v; gate and up) may have unlike forms
  int64_t count;
  const float* bias;  // [outputs] or null
  int64_t outputs, inputs;
};

inline long panels(const Weights& w) {  // of all parts
  long all = 0;
  for (long i = 0; i < w.count; i++) all += panels(w.parts[i].outputs);
  return all;
}

struct Best {  // the largest output of a row so far: of equal ones the first; the first NaN is larger than all
  float value;
  int64_t index;
  const uint32_t* mask;  // bit i of word j: output 32 j + i counts; null: all do
};

struct LinearCall {  // y = x W^T + bias + add
  const Weights* weights;
  Rows x, add, y;
  int64_t rows, threads;
  Best* best;  // [threads, rows] or null; if given, y is not written: each thread keeps what it has seen
  double cap;  // 0: none; else y becomes cap tanh(y / cap)
};

struct Sight {  // which slots before them a span's rows see; window 0: all, but for what their call says
  int64_t window;        // a row sees this many up to its own
  int64_t sinks;         // and the first ones
  const void* far;       // [rows, heads_q, dim], queries that read these first ones; null: those that read all
  const int64_t* seats;  // [rows], slots that the window is counted from; null: those the rows lie in
  int64_t block;         // rows see all of their block of so many own rows; 0 or 1: up to themselves
  // [heads_q], added to scaled (and capped) scores of slot 0, in rows that see it; null: nothing. With it, a span has
  // nothing in common, and no `heads`.
  const float* bias;
};

// How many of a span's own rows one of them sees.
inline long own_seen(const Sight& sight, long rows, long row) {
  long end = sight.block > 1 ? (row / sight.block + 1) * sight.block : row + 1;
  return end < rows ? end : rows;
}

// The keys or the values of a span's first `slots` slots, in lines of numbers of `bits` bits (2 or 4), the first of them in
// the lowest of a byte; `group` consecutive ones share a step and a lowest number: one is level * step + low. Of keys a
// line is what a block of `rows` slots (a multiple of 8) has of one channel, of values what a slot has of all.
struct Sealed {
  const uint8_t* levels;            // [heads, lines, bytes of a line]
  const uint16_t *step, *low;       // float16 [heads, lines, groups of a line], of whole bytes each
  int64_t levels_head, ends_head;   // strides count elements
  int64_t slots, rows;
  int64_t bits, group;
  // Added to the levels of a block: left right^T, and of each line `aparts` numbers at these places of the line.
  const uint16_t *left, *right;  // float16 [heads, blocks, rows, rank], [heads, blocks, dim, rank]
  int64_t left_head, right_head, rank;  // 0: there are none
  const uint16_t* apart;                // float16 [heads, lines, aparts]
  const int16_t* places;
  int64_t apart_head, aparts;  // 0: there are none
  // null, or a bit for each slot, those of `rows` from a byte on: the slots whose bit is set lie in these levels (2, 4 or
  // 8 bits), the others in `rest`, one after the other in either, whichever blocks they are of. A line is then what a
  // slot has of all heads, of keys as well, and its numbers are `scale` times as large; the strides above count nothing.
  // Keys without a scale have ends for each channel instead, [blocks, heads, dim]: of those rows of a block that are of
  // the class, the block's rest_rows and the others.
  const uint8_t* upper;
  const uint16_t* scale;  // float16 [heads, dim]
  const uint8_t* rest;
  const uint16_t *rest_step, *rest_low;  // float16 [lines]
  int64_t rest_bits, rest_rows;
};

struct Sides {
  Sealed keys, values;
};

struct Seal {  // rows of a layer's keys or values that become blocks
  const uint16_t* rows;  // bfloat16 [heads, slots, dim], the first that does; slots of a head lie one after the other
  int64_t row_head;
  Sealed to;  // where its blocks begin
};

struct SealCall {
  const Seal* seals;
  int64_t count, heads, dim;
  int64_t by_channel;  // as keys, else as values
  int64_t threads;
  int64_t slots;         // that are packed, of each
  int64_t rows, blocks;  // so many further than their seals say
};

// Of a span whose KV heads hold unequally many rows, or of whose heads some see windows: as if they all held `n` rows,
// which end at the same slot.
struct Head {
  const void *k, *v;                  // where its slot 0 would be
  const uint16_t *k_scale, *v_scale;  // likewise; null as in a Span
  int64_t begin;                      // the first slot that there is
  int64_t window, sinks;              // as in Sight, whose window the span has not; the sinks are from `begin` on
};

struct Places {       // of the slots of a layer's KV head
  const int64_t* at;  // their positions, where that of slot 0 would be; null: that of slot `first` is 0, and so on
  int64_t first;
};

struct Tempered {     // what is made of a row's scores before the softmax that tallies them
  int64_t noisy;      // whether Gumbel(0, 1) noise is added, as of a Noise
  int64_t seed, row;  // of that: the seed, and the row's position
  double inverse;     // they are multiplied with it then
  const Places* places;  // [layers, heads], of the slots before the row
};

struct Line {      // numbers of the slots of a layer's KV head, or of all its heads, in a plane of all layers
  int64_t from;    // which of the plane is that of slot `begin`, the first that there is
  int64_t begin;
  int64_t length;  // in numbers, a multiple of 64, and no fewer than there are slots
};

struct Tally {  // of a span with a single row, and at most QUERIES query heads to a KV head
  const Line* lines;    // of the layer: [heads], or one for all
  int64_t heads;        // that share a line; of planes that have a number for each of them it is so many times as long
  const uint8_t* gone;  // a plane: not 0 where the row does not see the slot
  float* weights;       // a plane, by head: what each slot gets of the row, summed over the query heads of a KV head
  float* scores;        // a plane of the layer alone, by query head, to work with
  const Tempered* tempered;  // or null; what the row reads of the slots hangs on its scores as they are
  int64_t layer;             // of the model, counted from 0
};

constexpr int64_t SHARED_BLOCK = 64;  // slots: those that a kernel looks at together (KEYS)

struct Planes {  // where a span's keys and values [heads, slots, dim] lie in one layer
  const void *k, *v;
  int64_t head;                       // numbers between two heads
  const uint16_t *k_scale, *v_scale;  // as in a Span
  int64_t scale_head;
};

struct Span {  // out = softmax(scale q k^T) v, q and out [rows, heads_q, dim]; the last `rows` of `n` slots are its own
  const void *q, *k, *v;
  void* out;
  float* lse;  // [rows, heads_q] or null
  int64_t q_row, k_head, k_row, v_head, v_row;  // strides count elements
  int64_t n, rows;
  const uint8_t* sees;  // [rows, first + rows], which of the last slots a row sees; null: as `sight.block` has it
  int64_t common;       // how many of its first slots are read by commons: all of them, without gaps
  // null, or bfloat16 [heads, slots]: k and v are int8, and a row's numbers these many times as large
  const uint16_t *k_scale, *v_scale;
  int64_t k_scale_head, v_scale_head;
  Sight sight;  // with a window, none of its slots are read in common
  int64_t first;  // slots before its own that are of the same tree: rows that came earlier
  // null, or where its first slots are instead, of bfloat16 [.., 32 n]; none of them is its own or read in common
  const Sides* sealed;
  const Head* heads;  // [heads], where each lies; null: at k and v. Such a span has no window and nothing in common
  const Tally* tally;  // or null. Such a span has nothing in common
  // [shared_slots / SHARED_BLOCK], where its first slots lie instead, block by block: rows that other spans may hold as
  // well, none of them its own. Such a span has no `sealed`, `heads` or `tally`
  const Planes* shared;
  int64_t shared_slots;
};

struct Common {  // slots `from` .. `to` that some spans hold alike, before their own; those of the first are read
  const int64_t* spans;
  int64_t count, from, to;
  int64_t level;  // 0, or one more than that of the common which ends where this one starts
};

struct AttentionCall {
  const Span* spans;
  int64_t count, heads_q, heads, dim;
  int64_t kind;
  int64_t window;  // 0: none; else a row sees only this many slots up to its own
  int64_t threads;
  double scale;
  const Common* commons;  // none with a window that hides slots of one
  int64_t common_count;
  double softcap;  // 0: none; else a score becomes softcap tanh(score / softcap)
  const float* sink_scores;  // [heads_q], one more score of every row, for which there is no slot; or null
};

struct Listed {  // as Span, but row r of head h reads the slots [heads, rows, count] that are listed for it; -1: none
  const void *q, *k, *v;
  void* out;
  int64_t q_row, k_head, k_row, v_head, v_row;
  int64_t rows, count;
  const int32_t* slots;
  const uint16_t *k_scale, *v_scale;
  int64_t k_scale_head, v_scale_head;
  // [rows, heads_q], [rows, heads, dim], or null: what is read counts for the share `held`, `rest` for what is left of 1.
  const float *held, *rest;
};

struct ListedCall {
  const Listed* spans;
  int64_t count, heads_q, heads, dim;
  int64_t kind, threads;
  double scale;
};

struct Pages {  // of consecutive slots; one query row is to read the `chosen` of them that promise the most, per head
  const void *q;           // [heads_q, dim]
  const void *low, *high;  // bounds of each page's keys [heads, pages, dim]; high null: low is what a score is taken with
  int64_t low_head, high_head;
  int64_t pages, size, chosen;
  int64_t own, n;  // slots from `own` to `n` are read in any case
  int32_t* slots;  // [heads, chosen * size + n - own], increasing
};

struct PagesCall {
  const Pages* spans;
  int64_t count, heads_q, heads, dim;
  int64_t kind, threads;
};

struct PrefillCall {  // q [rows, heads_q, dim] see slots of k, v [heads, n, dim] as `sight` has it; theirs are the last
  const void *q, *k, *v;
  void* out;  // [rows, heads_q, dim]
  int64_t q_row, q_head, k_head, k_row, v_head, v_row;  // strides count elements
  int64_t n, rows, heads_q, heads, dim;
  int64_t kind, threads;
  double scale;
  const uint16_t *k_scale, *v_scale;  // as in a Span
  int64_t k_scale_head, v_scale_head;
  double softcap;  // as in AttentionCall
  Sight sight;
  const uint8_t* sees;  // [heads, rows, n], which of these slots a row sees; null: all of them
  int64_t sees_head, sees_row;
  float* lse;           // [rows, heads_q] or null
  const Head* unequal;  // [heads], as `heads` of a Span; or null. Such a call has no `sees`, and no queries of sinks
  const Planes* shared;  // as in a Span; without `unequal`
  int64_t shared_slots;
  const float* sink_scores;  // as in AttentionCall
};

struct Noise {  // added to scores, Gumbel(0, 1), a draw by row, key, query head and layer
  const int64_t *seeds, *rows;  // [rows]: the seed, and the position of a row
  const int32_t* keys;          // [heads, n], their positions
  int64_t keys_head;
  const int64_t* heads;  // [heads], the KV heads by number
  int64_t layer;
};

struct ReceivedCall {  // what slots of k [heads, n, dim] get of the weights of q [rows, heads_q, dim]
  const void *q, *k;
  float* out;           // [heads, n], summed over the rows and over the query heads of a KV head
  const int64_t* ends;  // [rows], how many slots each sees, not falling; but for those before its window
  int64_t q_row, q_head, k_head, k_row;  // strides count elements
  int64_t n, rows, heads_q, heads, dim;
  int64_t kind, threads, window;
  double scale, softcap;  // as in AttentionCall
  const float* lse;       // [rows, heads_q], the log-sum-exp of their scores, or null
  const Noise* noise;     // null: there is none
  const float* inverse;   // [rows], what scores, noise among them, are multiplied with then; null: with 1
};

struct RetireCall {     // a row's weights make scores of slots others, and of those that are left the lowest go
  const Line* lines;    // [count]
  int64_t count, heads;  // as in Tally
  const int64_t* most;   // [count]: of more than so many slots that are not gone lowest ones go
  float* scores;         // a plane; of those that are gone -inf
  uint8_t* gone;         // a plane, not 0: it is gone. That of the row's own slot, the last, is 0
  const float* weights;  // a plane, by head
  int64_t together;      // 0, or what the sum of the weights of all heads of a line is divided by
  int64_t sums;          // whether weights are added to the scores, else they take their place
  int64_t n, older;      // of all slots those before `older` may go; of equal ones the later do
  int64_t threads;
  // null, or [count, heads]: what counts are scores over how many positions there are from a slot's own to `row`
  const Places* places;
  int64_t row;
};

struct Norm {
  const float* weight;  // null: there is none
  double eps;
};

struct Experts {                   // of a layer: every row has the weighted sum of what `top` of them make of it
  const Weights* router;
  const Weights* const* products;  // [count, 2]: gate and up, down
  int64_t count, top;
  int64_t renormalise;  // whether the weights of those chosen are divided by their sum
  uint8_t* loads;       // [count]: set to 1 where the weights of one were read
};

constexpr int SILU = 0, GELU_TANH = 1, GELU = 2, RELU = 3;
constexpr int CLAMPED = 4;  // (up + 1) gate / (1 + e^(-alpha gate)), gates at most `limit`, ups within it

struct Gate {  // what a gated MLP makes of gates and ups
  int64_t activation;
  double alpha, limit;
};

struct Layer {  // of a stack
  Norm before_attention, after_attention, before_mlp, after_mlp;
  Norm heads;     // of queries and keys, weight [heads_q + heads, dim]
  int64_t whole;  // whether it is over all queries of a row, then over all its keys; else each head by itself
  const Weights *qkv, *o;         // null: rows pass its attention by
  const Weights *gate_up, *down;  // null where there are experts; without these too, rows pass its MLP by
  const Experts* experts;         // or null
  Gate gate;
  int64_t turn;           // which of the rotations; -1: none
  int64_t window;         // 0: none
  double scale, softcap;  // as in AttentionCall
  const float* sink_scores;  // likewise
};

struct Turn {  // one kind of rotary positions
  const uint16_t *cos, *sin;  // bfloat16 [positions, size]; the first half of sin is negated
  int64_t size;
};

struct Embeddings {  // a table [outputs, inputs] of `packed`, or as it lies; its rows are taken `scale` times
  const Weights* packed;
  const uint16_t* plain;  // bfloat16; null where it is packed
  int64_t vocab;
  double scale;
};

// How a layer's rows choose: they read everything; what they choose now; everything, but the layers after it read what it
// has chosen; what the layer before it that chose has; or what is given.
enum Way { ALL, CHOSEN, PICKS, AGAIN, GIVEN };
// What makes a candidate: the largest promise of its vectors to a query of the group; the shares of the softmaxes of the
// group's queries that they get, summed; the largest of these shares.
enum Rule { PROMISE, SHARE, PEAK };

struct LayerChoice {
  int64_t way;
  void *low, *high;         // vectors bfloat16 [heads, .., width] that stand for keys. `high` null: there is one for
                            // each, else two bounds; both null: keys as they lie. Or lists int32 [heads, chosen]
  int64_t head;             // numbers between two heads
  const int32_t* channels;  // [heads, width], those of a key that stand for it, and of a query that meet them; null: all
  const float* turn;        // cos and signed sin [2, turned], by which queries are turned before; null: they are not
  int64_t turned;
  int64_t line;  // numbers between two of a vector's: 1, but where `largest` is not 0
  // [heads, dim]: of the values of the vectors that are known, the call adds those of its own but the row's; lists then
  // come with the share of weight that they hold, and the mean of all values (Listed). Every slot has a share. Or null.
  float* sums;
  double scale;  // of products; 0: that of the layer's scores
};

// Of a span whose only row, at slot n - 1, reads in every head `chosen` of `units` candidates of `size` slots, the first
// at slot `first`, and all slots before and after them; in order, of equal ones the earlier.
struct Choice {
  int64_t first, units, size, chosen;
  int64_t rule, joint;       // joint: all heads choose together, of a group of all queries
  int64_t begin, end;        // of which vectors there are shares
  int64_t at, each, before;  // of unit u: those from at + u * each - before to at + (u + 1) * each, within these
  int64_t known;             // so many are written; the call adds those up to `end`, of keys that are there:
  int64_t step, parts;       // vector i is the mean, or has the bounds, of `parts` times `step` rows from i * step on
  int64_t width;
  const LayerChoice* layers;
  uint16_t* queries;  // [layers, heads_q, dim]: where those of layers that list something are put; or null
  int32_t* lists;     // [heads, slots that are read], of layers that take them over in calls of their own; or null
  // 0, or vectors are keys, and only so many of their numbers are looked at: those where a group's queries are largest, in
  // magnitudes summed. What a query then gives is divided by the root of the share of its own magnitude that they have.
  int64_t largest;
  int64_t group;    // slots are fetched in groups of so many, whole
  int64_t* beside;  // [layers, heads]: where it is put how many are fetched beside those listed; or null
};

struct VotesSpan {  // a row at the last of n slots of keys [heads, n, dim], bfloat16 or, with scales, int8
  const Choice* choice;  // of one layer
  const uint16_t* q;     // bfloat16 [heads_q, dim]
  const void* k;
  int64_t k_head, k_row;
  const uint16_t* k_scale;
  int64_t k_scale_head, n;
  int32_t* slots;  // [heads, those that are read]
  const void* v;   // from here on of layers that have `sums`: as keys
  int64_t v_head, v_row;
  const uint16_t* v_scale;
  int64_t v_scale_head;
  float *held, *rest;  // [heads_q], [heads, dim], as in Listed
};

struct VotesCall {
  const VotesSpan* spans;
  int64_t count, heads_q, heads, dim, threads;
};

struct StackSpan {  // as in Span
  int64_t n, rows;
  const uint8_t* sees;
  int64_t common;
  const Planes* planes;  // [layers]
  int64_t done;  // whether what its rows read stands in `read` already
  int64_t window, sinks;  // as in Sight; with a window, no layer has one that hides anything of the span
  int64_t near, beyond;   // rows seated from slot `beyond` on read sinks as if at place `near` of the turns; or near -1
  const int64_t* seats;
  int64_t block, first;
  const Choice* choice;  // or null; such a span has no window, nothing in common, and no layer a cap of its scores
  const Sides* sealed;   // [layers], as in Span; or null
  const Head* unequal;   // [layers, heads], as in Span; or null. Without a choice
  const Tally* tally;    // [layers], as in Span; or null
  const float* bias;     // [layers, heads_q], as in Sight; or null. Without `unequal`, and with nothing in common
  const Planes* shared;  // [layers, shared_slots / SHARED_BLOCK], as in Span; without a choice
  int64_t shared_slots;
};

struct LowRank {  // of a linear layer, bfloat16: y += (x down^T) up^T; null: there is nothing
  const Weights *down, *up;
};

struct Tuned {  // rows `from` .. `to` - 1 run with these beside the model's own weights
  int64_t from, to;
  const LowRank* layers;  // [layers of the stack, 4]: qkv, o, gate_up, down
};

// x [rows, hidden] bfloat16: the tokens' embeddings after all layers; keys and values go to slots. Or some consecutive
// halves of layers: half 2 i, layer i's queries, keys and values from x; half 2 i + 1, the rest of it.
struct StackCall {
  const Layer* layers;
  const Embeddings* embeddings;
  int64_t count, hidden, heads_q, heads, dim;
  uint16_t* x;
  int64_t rows, threads;
  const Turn* turns;  // from here on another in every call
  const int64_t *tokens, *positions;  // [rows]; tokens null: x has been embedded; places in the turns
  const StackSpan* spans;
  int64_t span_count;
  const Common* commons;  // of spans that are no slices (see stack.cpp)
  int64_t common_count;
  int64_t from, to;       // halves
  uint16_t *qkv, *read;   // bfloat16 [rows, heads_q + 2 heads, dim], [rows, heads_q, dim]: kept between calls, or null
  uint16_t* far;          // bfloat16 [rows, heads_q, dim]: as those, for spans that have a `near`
  const Tuned* tuned;     // of rows that no two of them have
  int64_t tuned_count;
};

struct HeadCall {  // of a language model: logits = norm(x) W^T + bias, or the index of the largest per row
  const Weights* weights;
  Norm norm;
  double cap;         // as in LinearCall
  const uint16_t* x;  // bfloat16 [rows, inputs]
  int64_t x_row;      // strides count elements
  int64_t rows, threads;
  float* logits;  // [rows, outputs] or null
  int64_t* best;  // [rows], where there are no logits; -1 where a mask leaves none that is more than -inf
  const uint32_t* const* masks;  // [rows], each as in Best; null: none
};

struct Suffixes {  // an automaton of all substrings of a text: the plain twin is methods/draft/_automaton.py
  int32_t *link, *length, *end, *first, *followers;  // of states: as there, the edge made last, and how many there are
  int32_t *from, *token, *target, *next;             // of edges
  int32_t* table;                                    // 1 + an edge, or 0: a power of two of places
  int64_t mask;                                      // places - 1
  int64_t states, edges, last, n;
};

struct Chain {  // what goes on after a text's end
  int64_t most, shortest;               // tokens, and how many must match
  double least;                         // likelihood of all of them together
  const double *only, *latest;          // of a token that alone followed so many, and of the latest of several
  int64_t onlys, latests;
  int64_t* tokens;  // [most]
  double* likely;
};
