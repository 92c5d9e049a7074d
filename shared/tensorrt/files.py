"""Names of what a TensorRT engine's artifact holds."""

PLAN_FILE = "engine.plan"
