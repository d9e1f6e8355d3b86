import numpy as np
import spillway_kv

rng = np.random.default_rng(0)
k, v = rng.standard_normal((2, 2, 4, 5000, 64), np.float32)  # [layers, H_kv, T, d] each
# [layers, T, H_q, d]: each head looks for the key of token 1234. The factor makes attention peaked.
queries = 2 * np.repeat(k[:, :, 1234], 4, axis=1)[:, None]

with spillway_kv.connect() as client:
    model = client.create_model(
        layer_count=2, query_head_count=16, kv_head_count=4, head_dim=64, dtype="float32"
    )
    sequence = client.create_sequence(model)
    sequence.append(0, 0, k, v)  # from layer 0 and position 0
    q = queries[0]
    result = sequence.attend(0, q)  # layer 0
    print("out", result.out.shape, "log-sum-exp", result.lse.shape)
    print("rows read", result.touched_row_counts.mean(), "of", sequence.token_count)
    print("certified error", result.certificate.relative_errors.max())

    exact = sequence.attend(0, q, spillway_kv.Policy(selector="all"))
    error = np.linalg.norm(result.out - exact.out, axis=-1) / np.linalg.norm(exact.out, axis=-1)
    print("observed error", error.max())

    with client.begin_step([sequence]) as step:  # one new token, in each layer
        for layer in range(2):
            new_k, new_v = rng.standard_normal((2, 1, 4, 1, 64), np.float32)  # [B, H_kv, T, d] each
            out, lse = step.attend(layer, queries[layer][None], new_k, new_v)
            (result,) = step.results()
            print("layer", layer, "promises", set(result.certificate.promises.ravel().tolist()))

    sequence.delete()
    client.delete_model(model)
