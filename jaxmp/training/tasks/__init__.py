"""What a run learns: data, stages, scores; of images, of a GPT-2, of a pretrained model."""
