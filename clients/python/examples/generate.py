import spillway
import torch
from spillway.transformers import SpillwayCache
from transformers import AutoModelForCausalLM, AutoTokenizer

# Any Llama-family model; this one is what `make demo` leaves behind.
path = "build/models/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
model.set_attn_implementation("spillway")

document = open("/usr/share/common-licenses/GPL-3").read()[:20000]
question = [{"role": "user", "content": document + "\n\nIn one sentence: what is this document?"}]
inputs = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_tensors="pt", return_dict=True
)

with spillway.connect() as client, SpillwayCache(model.config, client) as cache:
    made = model.generate(**inputs, past_key_values=cache, max_new_tokens=40, do_sample=False)
    print(tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(f"{cache.statistics.rows_touched_fraction:.1%} of the rows read")
    print(f"certified error {cache.statistics.certified_error_mean:.3f}")
