"""What a model says between the lines: tool calls and reasoning, told apart from content while the text arrives."""
