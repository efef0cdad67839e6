"""Text as token ids: encoders of documents, conversations under a chat template, and single prompts."""
