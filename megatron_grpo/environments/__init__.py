"""Where prompts come from and how rollouts are graded."""
