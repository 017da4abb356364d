"""Finished runs and pretrained models, scored with other codecs; a run folded for serving."""
