"""The loop: who is admitted, what a step does, how requests leave."""
