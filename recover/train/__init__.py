"""The reference trainer: one command pre-trains a LLaMA on replicas that may die, and writes down what happened."""
