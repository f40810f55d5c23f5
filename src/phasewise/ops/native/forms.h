// What a form of weights is: how its panels are packed, what it multiplies them with, and how a row is read back.
//
// A new form is: a WeightForm in kernels.h with its name in FORMS of weights.py, in the same order; a Form with these
// functions in a source of its own; its line in the table of linear.cpp. If it takes rows that are prepared in a way
// which is not there yet, also an InputsKind with its Inputs. Nothing else asks for a form: stacks, experts, the head,
// embeddings and low-rank weights go through parts.h.
//
// What every form keeps: a row's result depends on that row alone, bit for bit, whatever rows, threads and parts are
// beside it; an infinity or NaN in a row spoils that row only.
#pragma once
#include "kernels.h"
#include "pool.h"
#include "simd.h"

// How rows come to a product. If parts of unlike forms take the same kind, it is prepared once for all of them.
enum InputsKind {
  INPUTS_BFLOAT16,  // words of two numbers, or rows as they lie
  INPUTS_INT8,      // words of four bytes, and a scale for each group of 128
  INPUTS_PAIRS,     // pairs of numbers in the order of levels, and the sum of each 32; with AVX2 see level_inputs.h
  INPUTS_NIBBLES,   // the same for kinds whose levels are nibbles: with AVX2 alone
  INPUTS_BYTES_32,  // bytes in the order of levels, and a scale for each group of so many
  INPUTS_BYTES_64,
  INPUTS_BYTES_128,
  INPUTS_KINDS
};

struct Inputs {
  // Bytes that all rows of the call take, prepared; they hang on its rows and its weights' inputs. 0: `prepare` does
  // nothing, and the product takes the rows of the call.
  long (*room)(const LinearCall& call);
  // What one of `all` threads prepares, in `room`, aligned to a cache line. The threads meet before it is read.
  void (*prepare)(const LinearCall& call, void* room, int thread, int all);
};

// What one thread multiplies: the rows of a call with panels of one part of its weights. It ends with `write` of tile.h
// for every row and panel.
struct PartProduct {
  const LinearCall& call;
  const WeightsPart& part;
  long first;          // which output of the call's weights is the first one of the part
  const void* inputs;  // as the form's kind of inputs prepares them
  Numbers& numbers;    // of panels, counted over all parts
  long before;         // so many panels of the weights are of parts before this one
  int thread;

  long next_panel() const {  // of the part, to be multiplied by this thread; -1: none is left
    long number = numbers.next(before + panels(part.outputs));
    return number < 0 ? -1 : number - before;
  }
};

struct Form {
  int inputs;                       // an InputsKind
  long (*panel_bytes)(long inputs);  // of WIDTH outputs, a multiple of 64
  // Rows of a weight [outputs, inputs], in a dtype (`kind`) that the form takes, become the panels of `to`, and its scales
  // if the form has some. Outputs beyond those there are give what nobody reads.
  void (*pack)(const Rows& weight, const WeightsPart& to, long inputs, int threads);
  void (*multiply)(const PartProduct& product);
  void (*row)(const WeightsPart& part, long inputs, long which, bf16* out);  // output `which` of the part, [inputs]
};

extern const Form BFLOAT16_FORM, INT8_FORM;        // linear16.cpp, linear8.cpp
extern const Form LEVEL_FORMS[LEVEL_KINDS * 2];    // levels.cpp
extern const Inputs BFLOAT16_INPUTS, INT8_INPUTS, PAIRS_INPUTS, NIBBLES_INPUTS;
extern const Inputs BYTES_32_INPUTS, BYTES_64_INPUTS, BYTES_128_INPUTS;
