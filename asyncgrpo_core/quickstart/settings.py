"""Training settings of the quickstart; being measured."""

TRAINING = {
    "learning_rate": 2e-4,
    "num_generations": 8,
    "token_budget": 768,
    "gradient_accumulation_steps": 4,
    "max_staleness": 4,
    "max_steps": 100,
    "num_sampler_logprobs": 8,
    "max_grad_norm": 1.0,
    "adam_beta2": 0.999,
    "temperature": 1.0,
    "max_completion_length": 8,
    "max_model_len": 64,
}
