"""The reference trainer: pre-trains a LLaMA on replicas that may die."""
