#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "host/base/limits.h"
#include "host/base/row_format.h"

namespace spillway {

// How codes are computed from keys and queries.
enum class HashKind : uint8_t { kNone, kRotation, kMlp };

struct HashSpec {
  HashKind kind = HashKind::kRotation;
  // Whether keys are hashed without subtracting a centre.
  bool raw_keys = false;
  // kRotation: bits per dimension of the codes of keys, in [1, 4], and the seed of the rotation.
  int bits_per_dim = 3;
  uint64_t seed = 0;
  // kRotation: bits per dimension of the codes of values, in [0, 3]; 0: there are none.
  int value_bits = 0;
  // kMlp: hash_bits is the length of one MLP's code, a multiple of 32 in [32, 1024]. hidden_dim is
  // the width of the hidden layers (0: head_dim, filled in by Normalize), hidden_layer_count their
  // number, 1 or 2. residual: Spotlight's residual form. per_query_head: one MLP per query head,
  // not per KV head. query_weights: queries have their own MLPs, one per query head.
  int hash_bits = 128;
  int hidden_dim = 0;
  int hidden_layer_count = 1;
  bool residual = false;
  bool per_query_head = false;
  bool query_weights = false;
};

// What the index stores for each key in addition to its codes; 0 or false: nothing.
struct KeyIndexSpec {
  bool int4_keys = false;          // the key with 4 bits per element
  int quest_page_token_count = 0;  // bounds of each 16, 32, 64 or 128 keys
  int label_channel_count = 0;     // channels with 4 bits each; a multiple of 8
  int lsh_table_count = 0;         // buckets per key, in [1, 512]
  int lsh_bits = 0;                // bits of a bucket's number, in [1, 16]
  uint64_t lsh_seed = 0;

  bool any() const {
    return int4_keys || quest_page_token_count > 0 || label_channel_count > 0 ||
           lsh_table_count > 0;
  }
};

inline constexpr double kResidentSampleFractionMax = 0.0625;
inline constexpr int64_t kSinkLogitCountMax = int64_t{1} << 18;

// The shapes of a model. Not changed after the model is created.
struct ModelSpec {
  int layer_count = 0;
  int query_head_count = 0;
  int kv_head_count = 0;
  int head_dim = 0;
  DType dtype = DType::kBF16;
  // How rows are stored. kInt8: not with MLPs or key indices, which read keys in the dtype.
  RowType row_type = RowType::kElements;
  double softmax_scale = 0;  // 0: 1 / sqrt(head_dim), filled in by Normalize.
  // Learned sink logits [layer_count][query_head_count]; empty: there are none. A head's sink adds
  // exp(logit) to the denominator of its softmax, like a row with value 0 that is always read.
  std::vector<float> sink_logits;
  // If this model is a part of a larger one: the number of layers, and of KV heads, of the larger
  // model before those of this part. Random numbers depend on the position in the larger model, so
  // that the parts give the same answers as the whole.
  int first_layer = 0;
  int first_kv_head = 0;
  HashSpec hash;
  KeyIndexSpec indices;
  // The resident sample: the share of the tokens whose rows a device may keep in its memory, at
  // most kResidentSampleFractionMax, and the seed that picks these tokens. Samples of policies with
  // the same seed begin with them.
  double resident_sample_fraction = 0.01;
  uint64_t resident_sample_seed = 0;

  // The tokens of the resident sample are those whose hash is below this; see
  // SampleOrder::resident. 0 if the policy has another seed.
  uint32_t ResidentSample(uint64_t policy_seed) const {
    return policy_seed == resident_sample_seed
               ? static_cast<uint32_t>(resident_sample_fraction * 4294967296.0)
               : 0;
  }
  // The sink logit of a query head; -infinity: it has no sink.
  float SinkLogit(int layer, int query_head) const {
    return sink_logits.empty()
               ? -std::numeric_limits<float>::infinity()
               : sink_logits[static_cast<size_t>(layer) * query_head_count + query_head];
  }
  // Query head h reads KV head h / query_heads_per_kv_head().
  int query_heads_per_kv_head() const { return query_head_count / kv_head_count; }
  // Number of query heads of a group. The heads of a group choose their rows together: they are all
  // those of a KV head or, if these are more than kGroupMax, equal parts of them, as large as
  // possible. Group i has query heads [i * group(), (i + 1) * group()).
  int group() const {
    const int heads = query_heads_per_kv_head();
    int size = std::min(heads, kGroupMax);
    while (heads % size != 0) --size;
    return size;
  }
  int group_count() const { return query_head_count / group(); }
  int groups_per_kv_head() const { return group_count() / kv_head_count; }
  // The KV head that a group reads.
  int KvHeadOf(int group_index) const { return group_index / groups_per_kv_head(); }
  RowFormat row_format() const { return {dtype, row_type, head_dim}; }
  // Bytes of one row of one KV head, as it is stored.
  int64_t row_bytes() const { return row_format().row_bytes(); }
  // Bytes of one row [K(d) | V(d)] in the dtype, as clients see it.
  int64_t element_row_bytes() const { return row_format().element_bytes(); }
  // Number of bit planes of a code; number of 32-bit words of a plane (zero-padded); bits of a
  // plane.
  int plane_count() const {
    return hash.kind == HashKind::kRotation ? hash.bits_per_dim
           : hash.kind == HashKind::kMlp    ? 1
                                            : 0;
  }
  int plane_words() const { return (plane_bits() + 31) / 32; }
  int plane_bits() const {
    return hash.kind == HashKind::kMlp ? key_code_count() * hash.hash_bits : head_dim;
  }
  // Number of codes of a key, which lie one after the other in its plane: one per query head of the
  // group if each query head has an MLP, otherwise one.
  int key_code_count() const { return hash.per_query_head ? group() : 1; }
  // Number of query heads that are compared with the same code of a key.
  int heads_per_code() const { return group() / key_code_count(); }
  // The number of matching bits of a key, summed over the group, is in [0, match_bin_count()).
  int match_bin_count() const { return plane_bits() * heads_per_code() + 1; }
  // Number of MLPs of a layer. REQUIRES: groups_per_kv_head() is 1. Query head h uses MLP h /
  // heads_per_code(); with query_weights it uses MLP h of the queries' MLPs.
  int mlp_count() const { return kv_head_count * key_code_count(); }
  // Bits per dimension of the codes of values; 0: there are none.
  int value_bits() const { return hash.kind == HashKind::kRotation ? hash.value_bits : 0; }
  // Whether a device stores any index of the keys.
  bool has_index() const { return hash.kind != HashKind::kNone || indices.any(); }
  // Whether the client must upload weights.
  bool has_weights() const {
    return hash.kind == HashKind::kMlp || indices.label_channel_count > 0;
  }
};

// A refused field and the reason ("value 7 is not in [1, 4]").
struct FieldError {
  std::string field;
  std::string description;
};

// Whether this build has the optional method that reads this field of a model. model_field: the
// field's name in the API ("key_indices.int4_keys"). Defined in host/policy/methods.cc.
bool HasMethodOf(std::string_view model_field);

// Fills in defaults. Returns the fields that are out of range or need a method that is not in this
// build; empty if the spec is valid. Field names are those of the proto (query_head_count,
// hash_weights.rotation...).
std::vector<FieldError> Normalize(ModelSpec& spec);

}  // namespace spillway
