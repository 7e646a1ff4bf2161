"""OpenAI's routes for sound and images, which get one clear refusal."""
