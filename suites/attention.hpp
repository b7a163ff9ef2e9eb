// What the contracts over a context-parallel axis share: keys, rows, labels and layouts of a line.
//
//   tensors [rows, heads, dim], or [seq, batch, heads, dim] where seq is given: rows cut over cp by
//   layout=, batch over dp, heads over tp. With docs= the rows hold packed documents and padding.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "fixtures/packing.hpp"
#include "oracle/contract.hpp"
#include "reference/attention.hpp"

namespace shardproof::contexts {

// tokens seq batch docs cu_seqlens layout.
std::vector<Key> token_keys(const char* tokens);
Key list_key(const char* name, size_t entries,
             const char* help);  // entries 0: any number, added up
Key offsets_key(const char* name, const char* help);
Key number_key(const char* name, double least, double most, const char* help);
Key scale_key();  // of scores
Key base_key();   // of rotary angles

// index=off|i32|i64: cu_seqlens, and cu_seqlens_k where keys have documents of their own, as
// operands of that type.
Key index_key();
std::vector<Operand> offset_operands(const Case&);

bool packed(const Case&);
int64_t ranks(const Case&);               // of cp
bool own_keys(const Case&);               // of documents with other counts of keys than of queries
Packing packing(const Case&, bool keys);  // of docs, or of kv_docs where the line has them
int64_t rows_of(const Case&, bool keys);  // extent of dim 0
int64_t batch_of(const Case&);            // 1 where not seq
std::vector<int64_t> token_shape(const Case&, bool keys, std::vector<int64_t> rest);
Placement rows_on_cp(const Case&, bool keys);
Layout tokens_on(const Case&, const Placement& tp, bool keys = false);

// By token of the whole operand: its sequence (-1: padding) and its position there. Positions of
// queries end with those of their keys.
std::vector<PackedToken> labels_of(const Case&, bool keys);

// Of the tokens of an operand, for the checks `leak` and `mask`: keys lie in rows of their own.
std::vector<int64_t> sequences_of(const Case&, const Operand&);

// ---- What an attention states, and a layer around it

Key kv_heads_key(bool cut_by_cp);  // left out: fewer than heads, and divisible
std::vector<Key> mask_keys();      // mask window
Key probs_key();
reference::Attention attention_of(const Case&);
reference::AttentionRounding attention_rounding(const Case&);
DType sums_of_keys(const Case&);  // type of parts of dK and dV on the wire
std::vector<Traffic> allgather_traffic(const Case&);
std::vector<Traffic> ring_traffic(const Case&);

}  // namespace shardproof::contexts
