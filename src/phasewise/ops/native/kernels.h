// The plain C interface: every argument is a data pointer, or a structure of 64-bit words passed by its address.
// Strides count elements.
#pragma once
#include <stdint.h>

#define API extern "C" __attribute__((visibility("default")))

constexpr long WIDTH = 64;  // outputs per panel of packed weights; the last panel is filled up with zeros

inline long panels(long outputs) { return (outputs + WIDTH - 1) / WIDTH; }

constexpr int FLOAT = 0, BFLOAT = 1;

struct Rows {  // a matrix whose rows are contiguous; data null: none
  void* data;
  int64_t stride;
  int64_t kind;
};

struct Weights {        // of one linear layer, made by `linear_pack` or `linear8_pack`
  void* packed;         // panels of [inputs / group][WIDTH][group], group = 2 bfloat16 or 4 int8
  const float* bias;    // [outputs] or null
  const float* scale;   // int8: [outputs], what one step of the weight is worth
  const int32_t* sums;  // int8: [outputs], the sum of the quantised weights
  int64_t outputs, inputs;
};

struct LinearCall {  // y = x W^T + bias + add
  const Weights* weights;
  Rows x, add, y;
  int64_t rows, threads;
};
