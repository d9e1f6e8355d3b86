// Compares the rows of restored sequences with their checksums.
#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "engine/engine.h"
#include "host/base/limits.h"
#include "host/memory/row_check.h"

namespace spillway {

std::optional<DamagedRows> Engine::CutDamage(Sequence& sequence, const RowCheck& check) {
  SequenceRecord& record = *sequence.record;
  const std::optional<SequenceRecord::Cut> begun = record.begun_cut();
  int64_t kept = begun ? begun->token_count : kTokenCountMax;
  int64_t shortest = kept;
  std::optional<DamagedRows> damage;
  for (int layer = 0; layer < record.layer_count(); ++layer) {
    const LayerRecord& rows = record.layer(layer);
    const RowCheck::Intact intact =
        check.Find(sequence.rows[layer], rows, rows.ReadableTokenCount(kPageTokenCount));
    shortest = std::min(shortest, rows.token_count());
    if (intact.token_count >= std::min(kept, rows.token_count())) continue;
    kept = intact.token_count;
    damage = DamagedRows{sequence.name, layer, intact.kv_head, kept, 0};
  }
  if (!begun && !damage) return std::nullopt;
  record.BeginCut(kept, (begun ? begun->generation : record.generation()) + (damage ? 1 : 0));
  for (int layer = 0; layer < record.layer_count(); ++layer) {
    LayerRecord& rows = record.layer(layer);
    if (rows.token_count() > kept) sequence.rows[layer].CutAdopted(rows, kept);
  }
  record.EndCut();
  sequence.generation = record.generation();
  if (damage) damage->lost_token_count = std::max<int64_t>(shortest - kept, 0);
  return damage;
}

void Engine::CheckRows(std::span<const std::shared_ptr<Sequence>> sequences,
                       RestoreReport& report) {
  const auto begin = std::chrono::steady_clock::now();
  absl::flat_hash_map<const Model*, RowCheck> checks;
  for (const std::shared_ptr<Sequence>& sequence : sequences) {
    RowCheck& check = checks[sequence->model.get()];
    for (int layer = 0; layer < sequence->record->layer_count(); ++layer) {
      check.Add(sequence->rows[layer],
                sequence->record->layer(layer).ReadableTokenCount(kPageTokenCount));
    }
  }
  for (auto& [model, check] : checks) {
    check.Run();
    report.checked_bytes += check.page_count() * kPageTokenCount * model->spec.row_bytes();
  }
  for (const std::shared_ptr<Sequence>& sequence : sequences) {
    if (auto damage = CutDamage(*sequence, checks.at(sequence->model.get()))) {
      report.damaged.push_back(*std::move(damage));
    }
    sequence->PublishRecord();
  }
  report.check_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace spillway
