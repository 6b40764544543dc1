# What type checkers see of fa3.quant; at run time fa3/exports.py gives it these names.
from .formats import QuantizedQKV as QuantizedQKV
from .interface import from_descales as from_descales
from .interface import pack_v as pack_v
from .interface import quantize_qkv as quantize_qkv
from .reference import dequantize_qkv as dequantize_qkv
