import spillway_kv
import torch
from spillway_kv.transformers import SpillwayCache, generate
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

# Llama, Qwen2.5, Gemma 3 and other models with plain softmax attention work.
path = "build/models/SmolLM2-135M-Instruct"
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
model.set_attn_implementation("spillway")

document = open("/usr/share/common-licenses/GPL-3").read()[:12000]
question = [{"role": "user", "content": document + "\n\nWhat is the name of this license?"}]
ids = tokenizer.apply_chat_template(
    question, add_generation_prompt=True, return_tensors="pt", return_dict=True
)["input_ids"]

with spillway_kv.connect("embedded:") as client, SpillwayCache(model.config, client) as cache:
    print(f"Reading {ids.shape[1]} tokens ...")
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    generate(model, cache, ids, max_new_tokens=100, do_sample=False, streamer=streamer)
    print(f"{cache.statistics.rows_touched_fraction:.1%} of the rows read")
    print(f"certified error {cache.statistics.certified_error_mean:.3f}")
